"""Tests of repeated blocks: a trace with repeats has the same events as a trace that executes every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Experiment, Layout, Model, Training
from repro.parallel import tensor
from repro.simulate.trace import repeat
from repro.simulate.trace.recorder import TraceRecorder
from repro.simulate.trace.roles import PipelineRole, Trace, roles, trace
from repro.simulate.trace.segments import UnrepeatableBlock

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
GLOO_LAYOUTS = {name: LAYOUTS[name] for name in ("zero2-buckets", "sp", "cp", "1f1b")}
"""Layouts whose traces also count the buffers of gloo."""


class CountingRecorder(TraceRecorder):
    """Recorder that counts the executed operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__torch_dispatch__(*args, **kwargs)


@pytest.fixture(autouse=True)
def _clear_recordings() -> None:
    repeat.recordings.cache_clear()


def trace_twice(
    experiment: Experiment, role: PipelineRole, *, gloo: bool = False
) -> tuple[Trace, Trace, float]:
    """Return the trace of all blocks, the trace with repeats, and the share of operators that the latter executes."""
    all_blocks, repeated = CountingRecorder(), CountingRecorder()
    full = trace(experiment, role, gloo=gloo, recorder=all_blocks, repeat=False)
    found = trace(experiment, role, gloo=gloo, recorder=repeated)
    return full, found, repeated.calls / all_blocks.calls


def assert_same(full: Trace, found: Trace) -> None:
    """Require equal events; `assert full.events == found.events` would print both traces."""
    for number, (one, other) in enumerate(zip(full.events, found.events, strict=False)):
        assert one == other, f"event {number} of {len(full.events)}"
    assert len(full.events) == len(found.events)
    assert (full.step_start, full.step_stop) == (found.step_start, found.step_stop)


DROPOUT_LAYOUTS = (
    *("one", "zero1", "zero3-recomputed", "sp-recomputed", "cp-sp-recomputed", "pa-cpu-md"),
    *("1f1b-recomputed", "interleaved", "softmax", "unfused"),
)
"""Layouts that are traced with dropout: one for each method of drawing and repeating dropout masks."""
CALL_LAYOUTS = (
    *("fp32", "zero1", "zero2-buckets", "zero2-fp32-gradients", "zero3", "tp", "sp", "pa-cpu-md"),
    *("1f1b-ddp", "1f1b-fused-accumulation", "interleaved"),
)
"""Layouts whose flat buffers differ in data type, stage, bucket size or order of gradients."""


def model_of(layout: Layout) -> Model:
    """Return all blocks for pipeline stages, else half of them: one executed block and three repeats."""
    return MODEL if layout.pp > 1 else replace(MODEL, layers=4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_repeats_do_not_change_any_event(name: str) -> None:
    layout, dropout = LAYOUTS[name], 0.1 if name in DROPOUT_LAYOUTS else 0.0
    training = Training(dropout=dropout, attention_dropout=dropout)
    experiment = Experiment(name="e", model=model_of(layout), layout=layout, training=training)
    shares = []
    for role in roles(experiment):
        full, found, share = trace_twice(experiment, role)
        assert_same(full, found)
        shares.append(share)
    assert min(shares) < 0.9, "no block was repeated"


@pytest.mark.parametrize("layout", GLOO_LAYOUTS.values(), ids=GLOO_LAYOUTS)
def test_receive_buffers_of_gloo_are_repeated(layout: Layout) -> None:
    experiment = Experiment(name="e", model=MODEL, layout=layout)
    for role in roles(experiment):
        assert_same(*trace_twice(experiment, role, gloo=True)[:2])


def test_recordings_are_not_reused_for_different_blocks() -> None:
    """A block with other operators, shapes or data types has a separate recording."""
    plain = Experiment(name="e", model=model_of(BASE), layout=BASE)
    others = [
        replace(plain, training=Training(dropout=0.1)),
        replace(plain, training=Training(attention_dropout=0.1)),
        replace(plain, training=Training(seq=16)),
        *(
            replace(plain, layout=LAYOUTS[name])
            for name in ("bf16", "cp", "softmax", "unfused", "reference", "zero3")
        ),
        replace(plain, layout=replace(BASE, micro_batch=2)),
        replace(plain, layout=replace(BASE, grad_dtype="fp32")),
    ]
    for experiment in (plain, *others, plain):
        full = trace(experiment, roles(experiment)[0], repeat=False)
        assert_same(full, trace(experiment, roles(experiment)[0]))


def test_recordings_are_reused_for_other_depths_and_degrees() -> None:
    """`plan` and `fit` trace equal blocks in many layouts, most of which need not execute a block."""
    first = Experiment(name="e", model=MODEL, layout=replace(BASE, dp=2, zero=1, recompute=True))
    trace(first, roles(first)[0])
    layout = replace(BASE, dp=4, zero=2, recompute=True, bucket_bytes=100_000)
    deeper = Experiment(name="e", model=replace(MODEL, layers=12), layout=layout)
    full, found, share = trace_twice(deeper, roles(deeper)[0])
    assert_same(full, found)
    assert share < 0.5


@pytest.mark.parametrize("name", CALL_LAYOUTS)
def test_repeated_calls_have_the_events_of_executed_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls create initial values and gradients. The reference is a trace that executes every call."""
    layout = LAYOUTS[name]
    experiment = Experiment(name="e", model=model_of(layout), layout=layout)
    role = roles(experiment)[0]
    found = trace(experiment, role)
    monkeypatch.setattr(TraceRecorder, "call_once", lambda recorder, key, call: call())
    assert_same(trace(experiment, role), found)


@pytest.mark.parametrize("kind", ["1f1b", "1f1b-recomputed", "1f1b-ddp"])
def test_additional_micro_batches_in_flight_execute_no_block(kind: str) -> None:
    """A deeper pipeline has more micro-batches in flight, each of which executes only its messages."""

    def calls(stages: int) -> int:
        layout = replace(LAYOUTS[kind], pp=stages, global_batch=64)
        experiment = Experiment(name="e", model=replace(MODEL, layers=4 * stages), layout=layout)
        recorder = CountingRecorder()
        trace(experiment, roles(experiment)[0], recorder=recorder)
        return recorder.calls

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
    experiment = Experiment(name="e", model=MODEL, layout=BASE)
    with pytest.raises(UnrepeatableBlock, match="outside the recorded block"):
        trace(experiment, roles(experiment)[0])


def test_a_repeated_operator_writes_to_its_output_argument() -> None:
    """GELU's gradient overwrites one of its operands (`grad_input=`), so the operator allocates nothing."""
    layout = replace(BASE, kernels="reference")
    experiment = Experiment(name="e", model=MODEL, layout=layout)
    allocations = [
        sum(
            getattr(event, "operator", "") == "aten.gelu_backward" for event in trace(experiment, role).events
        )
        for role in roles(experiment) * 2
    ]
    assert allocations == [0, 0]
