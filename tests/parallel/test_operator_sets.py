"""Tests that all operator sets, with and without overlap of communication, train the same model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import repro
from repro.config import ConfigError, Layout, Model
from repro.engines.native.engine import NativeEngine
from repro.model.operator_sets import WeightDropout, causal_mask
from repro.parallel import mesh as meshes
from repro.parallel.comm import Work
from repro.simulate.memory.live_bytes import RoleMemory, measure_live_bytes
from repro.simulate.trace.events import Message, Operator, PhaseStart, Wait
from repro.simulate.trace.roles import Trace, roles, trace
from tests.parallel.test_parity import BATCH, alone, assert_same
from tests.pool import RankPool
from tests.training import FEW, micro_batches, smallest, tiny, train
from tests.wrap.stock_models import BATCH as STOCK_BATCH
from tests.wrap.stock_models import Tied, optimizer_of, train_stock
from tests.wrap.test_parallelize import assert_trained_like_one

LONG = Model(name="long", layers=2, hidden=16, heads=2, vocab=32, seq=256)
"""Model whose activations are mainly attention scores."""
SCORES = 2 * 2 * 256 * 256 * 2
"""Bytes of a layer's scores of two samples in 16 bits."""
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


def assert_same_training(pool: RankPool, layout: Layout) -> None:
    model = smallest(layout)
    assert_same(pool.run(train, tiny(layout, model, **FEW)), alone(model=model, **FEW), 1e-5, 1e-5)


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("kernels", ["softmax", "torchtitan-2024", "unfused"])
def test_operator_sets_equal_the_fused_kernels(kernels: str, training: dict[str, float]) -> None:
    found = train(tiny(Layout(micro_batch=BATCH, kernels=kernels), **training))
    assert_same([found], alone(**training), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, micro_batch=4, global_batch=BATCH, recompute=True),
        Layout(tp=2, sp=True, micro_batch=8),
        Layout(dp=2, zero=2, micro_batch=4),
        Layout(dp=2, micro_batch=2, global_batch=BATCH, bucket_bytes=3000),
        Layout(pp=2, micro_batch=4, global_batch=BATCH),
    ],
    ids=["tp-recompute", "sp", "dp-z2", "dp-adds", "pp"],
)
@pytest.mark.parametrize("kernels", ["softmax", "torchtitan-2024", "unfused"])
def test_two_processes_equal_one(two: RankPool, layout: Layout, kernels: str) -> None:
    """The dropped elements depend only on the index in the global batch and on the head."""
    layout = replace(layout, kernels=kernels)
    model, training = smallest(layout), {**DROPOUT, **FEW}
    found = two.run(train, tiny(layout, model, **training))
    expected = alone(model=model, **training)
    if layout.pp == 1:
        assert_same(found, expected, 1e-5, 1e-5)
    else:
        torch.testing.assert_close(found[-1].loss, expected.loss, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_16_bit_losses_equal_the_fused_kernels_within_rounding(kernels: str, precision: str) -> None:
    found = train(tiny(Layout(micro_batch=BATCH, precision=precision, kernels=kernels)))
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    torch.testing.assert_close(found.loss, alone(precision).loss, rtol=4 * unit, atol=0.0)


@pytest.mark.parametrize("cb", [True, False], ids=["", "no-cb"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_ranks_without_overlap_equal_one_process(two: RankPool, zero: int, cb: bool) -> None:
    layout = Layout(
        dp=2, zero=zero, cb=cb, overlap=False, micro_batch=2, global_batch=BATCH, bucket_bytes=3000
    )
    assert_same_training(two, layout)


@pytest.mark.parametrize("zero1_reduce", ["reduce-scatter", "all-reduce"])
def test_deepspeeds_first_release_equals_one_process(four: RankPool, zero1_reduce: str) -> None:
    """The release of February 2020 ran unfused operators without overlap of communication."""
    layout = Layout(tp=2, dp=2, zero=1, zero1_reduce=zero1_reduce, micro_batch=4, recompute=True)
    assert_same_training(four, replace(layout, kernels="unfused", overlap=False))


def dp_events(layout: Layout) -> list[str]:
    """Return ends of backward passes (`pass`), collectives over dp, their waits, and `optimizer`, in order."""
    mesh = meshes.shape_only_mesh(layout)
    experiment = tiny(layout)
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    found: list[str] = []
    transport = mesh.dp.transport

    class RecordedWork(Work):
        def __init__(self, name: str):
            super().__init__(finish=lambda: found.append(f"wait {name}"))

    class RecordingTransport:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Work:
                getattr(transport, name)(*arguments)
                found.append(name)
                return RecordedWork(name)

            return call

    mesh.dp.transport = RecordingTransport()  # type: ignore[assignment]
    for part in engine.parts:
        original = part.after_backward

        def after_backward(original: Any = original) -> None:
            original()
            found.append("pass")

        part.after_backward = after_backward  # type: ignore[method-assign]
    batches = micro_batches(experiment, 0, 0)
    engine.step(batches, lambda phase: found.append(phase) if phase == "optimizer" else None)
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_without_overlap_reductions_follow_the_last_backward_pass(zero: int) -> None:
    layout = Layout(dp=2, zero=zero, micro_batch=2, global_batch=8, bucket_bytes=20_000)
    overlapped, after = dp_events(layout), dp_events(replace(layout, overlap=False))
    reduction = "all_reduce" if zero == 0 else "reduce_scatter"
    last = len(after) - 1 - after[::-1].index("pass")
    last_pass = len(overlapped) - 1 - overlapped[::-1].index("pass")
    assert reduction in overlapped[overlapped.index("pass") : last_pass]
    assert after[: last + 1] == ["pass", "pass"]
    update = after.index("optimizer")
    issued = after[last + 1 : update]
    assert issued.count(reduction) == overlapped[: overlapped.index("optimizer")].count(reduction) > 1
    assert issued.count(f"wait {reduction}") == issued.count(reduction)
    if zero:
        # The gathers of updated parameters do not overlap either.
        assert after[update:].count("wait all_gather") == after[update:].count("all_gather") > 1
        assert "wait all_gather" not in overlapped


def test_stage_2_without_overlap_waits_for_each_bucket() -> None:
    layout = Layout(dp=2, zero=2, overlap=False, micro_batch=2, global_batch=8, bucket_bytes=20_000)
    found = dp_events(layout)
    reductions = [event for event in found if event.endswith("reduce_scatter")]
    assert len(reductions) > 4
    assert reductions == ["reduce_scatter", "wait reduce_scatter"] * (len(reductions) // 2)
    assert "reduce_scatter" in found[: found.index("pass")]


def test_unknown_kernels_and_stage_3_without_overlap_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="kernels = 'apex': must be one of fused, fused-2024, fused-2026, megatron-2025, reference, softmax, "
        "torchtitan-2024, unfused",
    ):
        Layout(kernels="apex")
    with pytest.raises(ConfigError, match="overlap = false: must be true with zero = 3"):
        Layout(dp=2, zero=3, overlap=False)
    Layout(overlap=False)


def traced(kernels: str, training: dict[str, float] | None = None, **keys: Any) -> tuple[Trace, RoleMemory]:
    layout = Layout(micro_batch=2, precision="fp16", kernels=kernels, **keys)
    experiment = tiny(layout, LONG, **(training or {}))
    found = trace(experiment, roles(experiment)[0])
    return found, measure_live_bytes(found.events)


EXPECTED = {
    "fused": {},
    "softmax": {"aten.bmm": 6, "repro.causal_softmax": 1, "repro.causal_softmax_backward": 1},
    "unfused": {
        "aten.bmm": 6,
        "aten.div": 2,
        "aten.mul": 2,
        "aten.sub": 1,
        "aten._softmax": 1,
        "aten._softmax_backward_data": 1,
    },
}
"""Operators of one layer that read or write its scores."""
PASSES = {"fused": 0, "softmax": 11, "unfused": 21}
"""Reads and writes of a layer's scores."""


@pytest.mark.parametrize("kernels", EXPECTED)
def test_operator_sets_read_and_write_the_scores_as_expected(kernels: str) -> None:
    found: Counter[str] = Counter()
    passes = 0
    for times, operator in traced(kernels)[0].operators():
        times_read, times_written = operator.read // SCORES, operator.written // SCORES
        if times_read or times_written:
            found[operator.name] += times
            passes += times * (times_read + times_written)
    assert found == {name: LONG.layers * times for name, times in EXPECTED[kernels].items()}
    assert passes == LONG.layers * PASSES[kernels]


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_dropout_of_attention_weights_is_one_operator(kernels: str) -> None:
    names = Counter(
        operator.name
        for _, operator in traced(kernels, DROPOUT)[0].operators()
        if operator.read >= SCORES and operator.name.startswith("repro.bias_dropout")
    )
    layers = LONG.layers
    assert names == {
        "repro.bias_dropout_residual": layers,
        "repro.bias_dropout_residual_backward": layers,
    }


def test_fused_kernels_with_dropout_write_16_bit_scores() -> None:
    """Dropout of attention weights excludes fused attention, so the sets `fused` and `softmax` run equal operators."""
    fused, softmax = traced("fused", DROPOUT), traced("softmax", DROPOUT)
    operators = [
        sorted(
            (o.name, n, o.read, o.written) for n, o in found.operators() if max(o.read, o.written) >= SCORES
        )
        for found, _ in (fused, softmax)
    ]
    assert operators[0] == operators[1] != []
    assert max(written for _, _, _, written in operators[0]) < 2 * SCORES, "fp32 has twice these bytes"


def test_operators_outside_attention_are_fused_per_set() -> None:
    """Biases, GELU and residuals are one operator each. Dropout with probability 0 has no operator."""
    names = {
        kernels: Counter(operator.name for _, operator in traced(kernels)[0].operators())
        for kernels in ("softmax", "unfused")
    }
    layers = LONG.layers
    assert names["softmax"]["repro.bias_gelu"] == names["unfused"]["aten.gelu"] == layers
    assert names["softmax"]["repro.bias_dropout_residual"] == 2 * layers
    assert names["unfused"]["repro.bias_dropout_residual"] == names["unfused"]["repro.bias_gelu"] == 0
    assert names["unfused"]["aten.add_"] - names["softmax"]["aten.add_"] == 2 * layers
    # Output bias and residual of attention and of the MLP.
    assert names["unfused"]["aten.add"] - names["softmax"]["aten.add"] == 4 * layers


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_simulated_memory_contains_the_scores(kernels: str) -> None:
    """Each layer retains its scores until backward, twice with dropout. With recomputation, only one layer does."""
    fused = traced("fused")[1].most["activations"]
    retained = traced(kernels)[1].most["activations"] - fused
    assert LONG.layers * SCORES <= retained < (LONG.layers + 2.5) * SCORES
    dropped = traced(kernels, DROPOUT)[1].most["activations"] - traced(kernels)[1].most["activations"]
    assert (LONG.layers - 1) * SCORES <= dropped < (LONG.layers + 0.1) * SCORES
    recomputed = traced(kernels, recompute=True)[1].peak_bytes - traced("fused", recompute=True)[1].peak_bytes
    assert SCORES <= recomputed < 4.5 * SCORES


def tp_collectives(layout: Layout) -> list[tuple[str, str, str, int]]:
    """Return phase, operation and purpose of each tp collective, and the number of matrix products before its wait."""
    experiment = tiny(layout)
    found: list[tuple[str, str, str, int]] = []
    phase, products = "", 0
    issued: dict[int, tuple[Message, int]] = {}
    for event in trace(experiment, roles(experiment)[0]).events:
        if isinstance(event, PhaseStart):
            phase = event.name
        elif isinstance(event, Operator):
            products += event.name.startswith(("aten.mm", "aten.addmm"))
        elif isinstance(event, Message) and event.group == "tp":
            issued[event.work] = event, products
        elif isinstance(event, Wait) and event.work in issued:
            message, before = issued.pop(event.work)
            found.append((phase, message.op, message.purpose, products - before))
    return found


@pytest.mark.parametrize("kernels", ["reference", "softmax", "unfused"])
@pytest.mark.parametrize("tp_overlap", [True, False])
def test_all_operator_sets_overlap_tp_collectives_equally(kernels: str, tp_overlap: bool) -> None:
    layout = Layout(tp=2, micro_batch=2, recompute=True, tp_overlap=tp_overlap)
    fused = tp_collectives(layout)
    assert tp_collectives(replace(layout, kernels=kernels)) == fused
    assert any(products for phase, _, _, products in fused if phase == "backward") == tp_overlap


def test_causal_mask_and_dropout_of_attention_weights() -> None:
    assert causal_mask(3, torch.empty(0, dtype=torch.float16)).tolist() == [
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    ]
    weights = torch.rand(2, 3, 5, 5)
    dropout = WeightDropout(0.4, 1234, first_sample=7, heads=6, first_head=3)
    torch.testing.assert_close(dropout(weights), weights * dropout.keep(weights, weights.shape[-1]) / 0.6)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stock_module_without_overlap_equals_one_process(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, overlap=False, micro_batch=STOCK_BATCH // 2, bucket_bytes=600)
    assert_trained_like_one(two.run(train_stock, "tied", "adamw", layout), "tied", "adamw")


def test_stock_module_refuses_an_operator_set() -> None:
    module = Tied()
    with pytest.raises(
        ConfigError, match="kernels = 'softmax': must be fused: a stock module brings its own"
    ):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(kernels="softmax"))


def test_without_gather_overlap_no_forward_waits_for_parameters(two: RankPool) -> None:
    """The step ends after the gathers of the updated parameters."""
    layout = Layout(dp=2, zero=2, micro_batch=2, global_batch=BATCH, bucket_bytes=3000, gather_overlap=False)
    assert_same_training(two, layout)

    def waits(layout: Layout) -> dict[str, int]:
        """Return the number of waits for parameters in each phase."""
        traced = trace(tiny(layout), roles(tiny(layout))[0])
        gathers = {e.work for e in traced.events if isinstance(e, Message) and e.purpose == "parameters"}
        found: Counter[str] = Counter()
        for event in traced.events[: traced.step_stop]:
            if isinstance(event, PhaseStart):
                phase = event.name
            elif isinstance(event, Wait) and event.work in gathers:
                found[phase] += 1
        return dict(found)

    assert set(waits(layout)) == {"init", "optimizer"}
    assert set(waits(replace(layout, gather_overlap=True))) == {"forward"}
