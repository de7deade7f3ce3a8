"""Tests of repeated blocks: a trace with repeats has the same events as a trace that executes every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Experiment, Layout, Model, Training
from repro.parallel import tensor
from repro.simulate.trace import repeat
from repro.simulate.trace.recorder import TraceRecorder
from repro.simulate.trace.roles import roles, trace
from repro.simulate.trace.segments import UnrepeatableBlock
from tests.parallel.test_architectures import FAMILIES

MODEL = Model(name="small", layers=8, hidden=64, heads=4, vocab=128, seq=32)
BASE = Layout(micro_batch=1, global_batch=16, precision="fp16")
DEEP = replace(BASE, pp=2, dp=2)
LAYOUTS = {
    "one": BASE,
    "bf16": replace(BASE, precision="bf16", recompute=True),
    "fp32": replace(BASE, precision="fp32"),
    "zero1": replace(BASE, dp=2, zero=1, recompute=True, bucket_bytes=100_000),
    "zero1-feb2020": replace(BASE, dp=2, zero=1, zero1_reduce="all-reduce", overlap=False),
    "zero2-buckets": replace(BASE, dp=2, zero=2, bucket_bytes=150_000),
    "zero2-no-cb": replace(BASE, dp=2, zero=2, cb=False, recompute=True),
    "zero2-md": replace(BASE, dp=2, zero=2, md=True, recompute=True),
    "zero3": replace(BASE, dp=4, zero=3),
    "zero3-recomputed": replace(BASE, dp=4, zero=3, recompute=True, micro_batch=2),
    "zero3-mar2021": replace(BASE, dp=4, zero=3, zero3_gather="parameter", recompute=True),
    "fp32-gradients": replace(BASE, tp=2, sp=True, grad_dtype="fp32"),
    "zero2-fp32-gradients": replace(BASE, dp=2, zero=2, recompute=True, grad_dtype="fp32"),
    "1f1b-fused-accumulation": replace(DEEP, zero=1, grad_dtype="fp32", kernels="megatron-2025"),
    "tp": replace(BASE, tp=2, micro_batch=2),
    "tp-waits": replace(BASE, tp=2, tp_overlap=False, recompute=True),
    "sp": replace(BASE, tp=2, sp=True),
    "sp-recomputed": replace(BASE, tp=2, sp=True, recompute=True, micro_batch=4),
    "cp": replace(BASE, cp=2),
    "cp-sp-recomputed": replace(BASE, cp=2, tp=2, sp=True, recompute=True, zero=2),
    "pa": replace(BASE, tp=2, recompute=True, pa=True),
    "pa-cpu-md": replace(BASE, tp=2, recompute=True, pa=True, pa_cpu=True, md=True),
    "1f1b": replace(DEEP, zero=1),
    "1f1b-ddp": replace(DEEP, gradient_as_bucket_view=False),
    "1f1b-recomputed": replace(DEEP, recompute=True, bucket_bytes=100_000),
    "gpipe": replace(DEEP, schedule="gpipe", zero=2),
    "gpipe-md": replace(DEEP, schedule="gpipe", recompute=True, md=True),
    "interleaved": replace(DEEP, schedule="interleaved", chunks=2, tp=2, scatter_gather=True),
    "interleaved-alone": replace(DEEP, schedule="interleaved", chunks=4, recompute=True),
    "unequal": replace(DEEP, stage_layers=(5, 3), recompute=True),
    "softmax": replace(BASE, kernels="softmax", tp=2),
    "selective": replace(BASE, kernels="softmax", tp=2, sp=True, recompute="selective"),
    "selective-stages": replace(DEEP, kernels="unfused", recompute="selective", zero=1),
    "unfused": replace(BASE, kernels="unfused", micro_batch=2),
    "reference": replace(BASE, kernels="reference"),
}
DROPOUT_LAYOUTS = (
    *("one", "zero1", "zero3-recomputed", "sp-recomputed", "cp-sp-recomputed", "pa-cpu-md"),
    *("1f1b-recomputed", "interleaved", "softmax", "unfused"),
)
"""Layouts that are traced with dropout: one for each method of drawing and repeating dropout masks."""
GLOO_LAYOUTS = ("zero2-buckets", "sp", "cp", "1f1b")
"""Layouts whose traces also count the buffers of gloo."""
ARCHITECTURES = (
    *(("llama", "sp-recomputed"), ("llama", "cp"), ("llama", "1f1b-recomputed"), ("falcon", "sp-recomputed")),
    *(("falcon", "cp"), ("falcon", "zero3"), ("bloom", "1f1b-recomputed"), ("bloom", "softmax")),
)
"""Model family and layout of models whose layers differ from GPT-2's."""


class CountingRecorder(TraceRecorder):
    """Recorder that counts the executed operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__torch_dispatch__(*args, **kwargs)


class ExecutingRecorder(CountingRecorder):
    """Recorder that executes every call. Calls create initial values and gradients."""

    def call_once(self, key: Any, call: Callable[[], None]) -> None:
        call()


@pytest.fixture(autouse=True)
def _clear_recordings() -> None:
    repeat.recordings.cache_clear()


def assert_repeats_are_exact(experiment: Experiment, *, gloo: bool = False) -> None:
    """Require that a trace with repeats has the events of a trace that executes every block and every call.

    The trace with repeats executes less than half of the operators. Without repeated blocks, it would execute over 0.7.
    """
    for role in roles(experiment):
        executing, repeating = ExecutingRecorder(), CountingRecorder()
        full = trace(experiment, role, gloo=gloo, recorder=executing, repeat=False)
        found = trace(experiment, role, gloo=gloo, recorder=repeating)
        # `assert full.events == found.events` would print both traces.
        for number, (one, other) in enumerate(zip(full.events, found.events, strict=False)):
            assert one == other, f"event {number} of {len(full.events)}"
        assert len(full.events) == len(found.events)
        assert (full.step_start, full.step_stop) == (found.step_start, found.step_stop)
        assert repeating.calls / executing.calls < 0.5


def executed_operators(experiment: Experiment) -> int:
    """Return the number of operators that a trace of the first role executes."""
    recorder = CountingRecorder()
    trace(experiment, roles(experiment)[0], recorder=recorder)
    return recorder.calls


def experiment_of(layout: Layout, model: Model = MODEL, dropout: float = 0.0) -> Experiment:
    """Return a model with eight layers for pipeline stages, else with four: one executed block and three repeats."""
    model = replace(model, layers=8 if layout.pp > 1 else 4)
    training = Training(dropout=dropout, attention_dropout=dropout)
    return Experiment(name="e", model=model, layout=layout, training=training)


@pytest.mark.parametrize(("family", "name"), [*(("", name) for name in LAYOUTS), *ARCHITECTURES])
def test_repeats_do_not_change_any_event(family: str, name: str) -> None:
    dropout = 0.1 if name in DROPOUT_LAYOUTS and not family else 0.0
    experiment = experiment_of(LAYOUTS[name], FAMILIES[family] if family else MODEL, dropout)
    assert_repeats_are_exact(experiment, gloo=name in GLOO_LAYOUTS and not family)


def test_recordings_are_not_reused_for_different_blocks() -> None:
    """A block with other operators, shapes, data types or of another architecture has a separate recording."""
    plain = experiment_of(BASE)
    names = ("bf16", "cp", "softmax", "unfused", "reference", "zero3")
    layouts = [LAYOUTS[name] for name in names]
    layouts += [replace(BASE, micro_batch=2), replace(BASE, grad_dtype="fp32")]
    others = [
        *(replace(plain, training=Training(**{key: 0.1})) for key in ("dropout", "attention_dropout")),
        replace(plain, training=Training(seq=16)),
        *(replace(plain, layout=layout) for layout in layouts),
        *(experiment_of(BASE, FAMILIES[family]) for family in ("neox", "bloom")),
    ]
    for experiment in (plain, *others, plain):
        assert_repeats_are_exact(experiment)


def test_recordings_are_reused_for_other_depths_and_degrees() -> None:
    """`plan` and `fit` trace equal blocks in many layouts, most of which need not execute a block."""
    layout = replace(BASE, dp=4, zero=2, recompute=True, bucket_bytes=100_000)
    deeper = replace(experiment_of(layout), model=replace(MODEL, layers=12))
    new = executed_operators(deeper)
    repeat.recordings.cache_clear()
    executed_operators(experiment_of(replace(BASE, dp=2, zero=1, recompute=True)))
    assert executed_operators(deeper) < 0.8 * new
    assert_repeats_are_exact(deeper)


@pytest.mark.parametrize("kind", ["1f1b", "1f1b-recomputed", "1f1b-ddp"])
def test_additional_micro_batches_in_flight_execute_no_block(kind: str) -> None:
    """A deeper pipeline has more micro-batches in flight, each of which executes only its messages."""

    def calls(stages: int) -> int:
        layout = replace(LAYOUTS[kind], pp=stages, global_batch=64)
        model = replace(MODEL, layers=4 * stages)
        return executed_operators(Experiment(name="e", model=model, layout=layout))

    calls(2)  # records the blocks
    assert (calls(12) - calls(2)) / 10 < 8, "only operators outside the four blocks of a stage"


def test_a_block_with_external_state_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    retained: list[Tensor] = []
    plain = tensor.weight_gradient

    def retaining_weight_gradient(weight: Tensor, rows: Tensor, x: Tensor) -> Tensor | None:
        retained.append(torch.empty_like(rows))
        if len(retained) > 1:
            retained.pop(0)
        return plain(weight, rows, x)

    monkeypatch.setattr(tensor, "weight_gradient", retaining_weight_gradient)
    experiment = experiment_of(BASE)
    with pytest.raises(UnrepeatableBlock, match="the recorded block did not allocate"):
        trace(experiment, roles(experiment)[0])


def test_a_repeated_operator_writes_to_its_output_argument() -> None:
    """GELU's gradient overwrites one of its operands (`grad_input=`), so the operator allocates nothing."""
    experiment = experiment_of(LAYOUTS["reference"])
    for role in roles(experiment) * 2:
        operators = {getattr(event, "operator", "") for event in trace(experiment, role).events}
        assert "aten.gelu_backward" not in operators
        assert "aten.mm" in operators
