"""Tests that all operator sets, with and without overlap of communication, train the same model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import repro
from repro.config import ConfigError, Layout, Model
from repro.config.engines import has_fused_softmax
from repro.model.operator_sets import WeightDropout, _softmax_apart, causal_mask
from repro.simulate.memory.live_bytes import RoleMemory, measure_live_bytes
from repro.simulate.time.device import MATMULS
from repro.simulate.trace.events import Message, Operator, PhaseStart, Wait
from repro.simulate.trace.roles import Trace, roles, trace
from tests.parallel.test_parity import BATCH, DROPOUT, UNIT, alone, assert_parity, assert_same, name_of
from tests.pool import RankPool
from tests.training import FEW, tiny, train
from tests.wrap.stock_models import BATCH as STOCK_BATCH
from tests.wrap.stock_models import Tied, optimizer_of, train_stock
from tests.wrap.test_parallelize import assert_trained_like_one

LONG = Model(name="long", layers=2, hidden=16, heads=2, vocab=32, seq=256)
"""Model whose activations are mainly attention scores."""
SCORES = 2 * 2 * 256 * 256 * 2
"""Bytes of a layer's scores of two samples in 16 bits."""


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("kernels", ["softmax", "torchtitan-2024", "unfused"])
def test_operator_sets_equal_the_fused_kernels(kernels: str, training: dict[str, float]) -> None:
    found = train(tiny(Layout(micro_batch=BATCH, kernels=kernels), **training))
    assert_same([found], alone(**training), 1e-5, 1e-5)


@pytest.mark.parametrize(("kernels", "precision"), [("softmax", "bf16"), ("unfused", "fp16")])
def test_16_bit_losses_equal_the_fused_kernels_within_rounding(kernels: str, precision: str) -> None:
    found = train(tiny(Layout(micro_batch=BATCH, precision=precision, kernels=kernels)))
    torch.testing.assert_close(found.loss, alone(precision).loss, rtol=4 * UNIT[precision], atol=0.0)


TP2 = Layout(tp=2, micro_batch=4, global_batch=BATCH, recompute=True)
TP2_SP = Layout(tp=2, sp=True, micro_batch=BATCH)
ADDS = Layout(dp=2, micro_batch=2, global_batch=BATCH, bucket_bytes=3000)
PP2 = Layout(pp=2, micro_batch=4, global_batch=BATCH)


@pytest.mark.parametrize(
    "layout",
    [
        replace(TP2, kernels="softmax"),
        replace(ADDS, kernels="softmax"),
        replace(TP2_SP, kernels="torchtitan-2024"),
        replace(PP2, kernels="torchtitan-2024"),
        replace(TP2, kernels="unfused"),
        replace(TP2_SP, kernels="unfused"),
        Layout(dp=2, zero=2, micro_batch=4, kernels="unfused"),
        replace(TP2, kernels="reference"),
        replace(ADDS, overlap=False),
        replace(ADDS, overlap=False, zero=1, cb=False),
        replace(ADDS, overlap=False, zero=2),
        replace(ADDS, gather_overlap=False, zero=2),
        # DeepSpeed's release of February 2020
        replace(TP2, dp=2, zero=1, zero1_reduce="all-reduce", kernels="unfused", overlap=False),
    ],
    ids=name_of,
)
def test_every_layout_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The dropped elements depend only on the index in the global batch and on the head."""
    assert_parity(request, layout, **FEW, **DROPOUT)


def issued(layout: Layout, purpose: str) -> list[str]:
    """Return matrix products (`product`), messages of a purpose (`send`), waits for them, and phases of a step."""
    experiment = tiny(layout)
    traced = trace(experiment, roles(experiment)[0])
    works = {e.work for e in traced.events if isinstance(e, Message) and e.purpose == purpose}
    found = []
    for event in traced.events[traced.step_start : traced.step_stop]:
        if isinstance(event, PhaseStart):
            found.append(event.name)
        elif isinstance(event, Operator) and event.name in MATMULS:
            found.append("product")
        elif isinstance(event, Message) and event.work in works:
            found.append("send")
        elif isinstance(event, Wait) and event.work in works:
            found.append("wait")
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reductions_without_overlap_block(zero: int) -> None:
    """Stages 0 and 1 reduce after the last backward pass. Stage 2 waits for each bucket."""
    layout = Layout(dp=2, zero=zero, micro_batch=2, global_batch=8, bucket_bytes=20_000)
    overlapped, found = issued(layout, "gradients"), issued(replace(layout, overlap=False), "gradients")
    assert found.count("send") == overlapped.count("send") > 4
    # Events before the last product of the backward pass.
    during, before = (events[: len(events) - events[::-1].index("product")] for events in (overlapped, found))
    assert "send" in during
    reductions = [event for event in found[: found.index("optimizer")] if event in ("send", "wait")]
    if zero == 2:
        assert "send" in before
        assert reductions == ["send", "wait"] * found.count("send")
    else:
        assert "send" not in before
        assert reductions.count("wait") == found.count("send")


def test_without_gather_overlap_no_forward_waits_for_parameters() -> None:
    """The step ends after the gathers of the updated parameters."""
    layout = Layout(dp=2, zero=2, bucket_bytes=3000)
    for blocking in ({"gather_overlap": False}, {"overlap": False}):
        found = issued(replace(layout, **blocking), "parameters")
        assert "wait" not in found[: found.index("optimizer")]
        assert found.count("send") == found.count("wait") > 4
    found = issued(layout, "parameters")
    assert "wait" in found[: found.index("optimizer")]
    assert "wait" not in found[found.index("optimizer") :]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stock_module_without_overlap_equals_one_process(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, overlap=False, micro_batch=STOCK_BATCH // 2, bucket_bytes=600)
    assert_trained_like_one(two.run(train_stock, "tied", "adamw", layout), "tied", "adamw")


def test_unsupported_operator_sets_and_overlap_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="kernels = 'apex': must be one of fused, fused-2024, fused-2026, megatron-2025, reference, softmax, "
        "torchtitan-2024, unfused",
    ):
        Layout(kernels="apex")
    with pytest.raises(ConfigError, match="overlap = false: must be true with zero = 3"):
        Layout(dp=2, zero=3, overlap=False)
    module = Tied()
    with pytest.raises(
        ConfigError, match="kernels = 'softmax': must be fused: a stock module defines its own"
    ):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(kernels="softmax"))


def traced(kernels: str, training: dict[str, float] | None = None, **keys: Any) -> tuple[Trace, RoleMemory]:
    layout = Layout(micro_batch=2, precision="fp16", kernels=kernels, **keys)
    experiment = tiny(layout, LONG, **(training or {}))
    found = trace(experiment, roles(experiment)[0])
    return found, measure_live_bytes(found.events)


UNFUSED_OPERATORS = {"aten.bmm": 6, "aten.div": 2, "aten.mul": 2, "aten.sub": 1, "aten._softmax": 1}


@pytest.mark.parametrize(
    ("kernels", "expected", "expected_passes"),
    [
        ("fused", {}, 0),
        ("softmax", {"aten.bmm": 6, "repro.causal_softmax": 1, "repro.causal_softmax_backward": 1}, 11),
        ("unfused", {**UNFUSED_OPERATORS, "aten._softmax_backward_data": 1}, 21),
    ],
    ids=["fused", "softmax", "unfused"],
)
def test_operator_sets_read_and_write_the_scores_as_expected(
    kernels: str, expected: dict[str, int], expected_passes: int
) -> None:
    """Expected are the operators of one layer that read or write its scores, and their reads and writes."""
    found: Counter[str] = Counter()
    passes = 0
    for times, operator in traced(kernels)[0].operators():
        times_read, times_written = operator.read // SCORES, operator.written // SCORES
        if times_read or times_written:
            found[operator.name] += times
            passes += times * (times_read + times_written)
    assert found == {name: LONG.layers * times for name, times in expected.items()}
    assert passes == LONG.layers * expected_passes


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_dropout_of_attention_weights_is_one_operator(kernels: str) -> None:
    names = Counter(
        operator.name
        for _, operator in traced(kernels, DROPOUT)[0].operators()
        if operator.read >= SCORES and operator.name.startswith("repro.bias_dropout")
    )
    name = "repro.bias_dropout_residual"
    assert names == {name: LONG.layers, f"{name}_backward": LONG.layers}


def test_fused_kernels_with_dropout_write_16_bit_scores() -> None:
    """Dropout of attention weights excludes fused attention, so the sets `fused` and `softmax` run equal operators."""
    fused, softmax = (
        sorted(
            (o.name, n, o.read, o.written)
            for n, o in traced(kernels, DROPOUT)[0].operators()
            if max(o.read, o.written) >= SCORES
        )
        for kernels in ("fused", "softmax")
    )
    assert fused == softmax != []
    assert max(written for *_, written in fused) < 2 * SCORES, "fp32 has twice these bytes"


def test_operators_outside_attention_are_fused_per_set() -> None:
    """Biases, GELU and residuals are one operator each. Dropout with probability 0 has no operator."""
    softmax, unfused = (
        Counter(operator.name for _, operator in traced(kernels)[0].operators())
        for kernels in ("softmax", "unfused")
    )
    layers = LONG.layers
    assert softmax["repro.bias_gelu"] == unfused["aten.gelu"] == layers
    assert softmax["repro.bias_dropout_residual"] == 2 * layers
    assert unfused["repro.bias_dropout_residual"] == unfused["repro.bias_gelu"] == 0
    assert unfused["aten.add_"] - softmax["aten.add_"] == 2 * layers
    # Output bias and residual of attention and of the MLP.
    assert unfused["aten.add"] - softmax["aten.add"] == 4 * layers


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_simulated_memory_contains_the_scores(kernels: str) -> None:
    """Each layer retains its scores until backward, twice with dropout. With recomputation, only one layer does."""
    plain = traced(kernels)[1].most["activations"]
    retained = plain - traced("fused")[1].most["activations"]
    assert LONG.layers * SCORES <= retained < (LONG.layers + 2.5) * SCORES
    dropped = traced(kernels, DROPOUT)[1].most["activations"] - plain
    assert (LONG.layers - 1) * SCORES <= dropped < (LONG.layers + 0.1) * SCORES
    recomputed = traced(kernels, recompute=True)[1].peak_bytes - traced("fused", recompute=True)[1].peak_bytes
    assert SCORES <= recomputed < 4.5 * SCORES


def tp_collectives(layout: Layout) -> list[tuple[str, str, str, int]]:
    """Return phase, operation and purpose of each tp collective, and the number of matrix products before its wait."""
    experiment = tiny(layout)
    found: list[tuple[str, str, str, int]] = []
    phase, products = "", 0
    running: dict[int, tuple[Message, int]] = {}
    for event in trace(experiment, roles(experiment)[0]).events:
        if isinstance(event, PhaseStart):
            phase = event.name
        elif isinstance(event, Operator):
            products += event.name.startswith(("aten.mm", "aten.addmm"))
        elif isinstance(event, Message) and event.group == "tp":
            running[event.work] = event, products
        elif isinstance(event, Wait) and event.work in running:
            message, before = running.pop(event.work)
            found.append((phase, message.op, message.purpose, products - before))
    return found


@pytest.mark.parametrize("tp_overlap", [True, False])
def test_all_operator_sets_overlap_tp_collectives_equally(tp_overlap: bool) -> None:
    layout = Layout(tp=2, micro_batch=2, recompute=True, tp_overlap=tp_overlap)
    fused = tp_collectives(layout)
    assert any(products for phase, _, _, products in fused if phase == "backward") == tp_overlap
    for kernels in ("reference", "softmax", "unfused"):
        assert tp_collectives(replace(layout, kernels=kernels)) == fused, kernels


def test_causal_mask_and_dropout_of_attention_weights() -> None:
    mask = causal_mask(3, torch.empty(0, dtype=torch.float16))
    assert mask.tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
    weights = torch.rand(2, 3, 5, 5)
    dropout = WeightDropout(0.4, 1234, first_sample=7, heads=6, first_head=3)
    torch.testing.assert_close(dropout(weights), weights * dropout.keep(weights, weights.shape[-1]) / 0.6)


@pytest.mark.parametrize(
    ("samples", "heads", "s", "fused"),
    [
        *((1, 4, 2048, True), (2, 2, 1024, True), (4, 1, 16, True)),
        *((1, 2, 2048, False), (2, 3, 1024, False), (4, 4, 4096, False), (4, 4, 18, False)),
    ],
)
def test_fused_softmax_needs_multiples_of_4_matrices(samples: int, heads: int, s: int, fused: bool) -> None:
    assert has_fused_softmax(samples, heads, s) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unfused_softmax_equals_the_fused_softmax(dtype: torch.dtype) -> None:
    """The fused operator computes the gradient from weights that were rounded to 16 bits."""
    torch.manual_seed(0)
    scores = torch.randn(1, 3, 24, 24, dtype=torch.float64).to(dtype)
    fused, unfused = (scores.clone().requires_grad_() for _ in range(2))
    expected = repro.kernels.causal_softmax(fused, 0.25, plain=True)
    found = _softmax_apart(unfused, 0.25)
    torch.testing.assert_close(found, expected)  # also compares data types
    grad = torch.randn_like(expected)
    expected.backward(grad)
    found.backward(grad)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(unfused.grad, fused.grad, rtol=8 * unit, atol=unit / 8)


@pytest.mark.parametrize(("samples", "fused"), [(1, False), (2, True)])
def test_unfused_softmax_moves_36_bytes_per_score(samples: int, fused: bool) -> None:
    """The fused operator moves 4 bytes. The operators convert to fp32, scale, mask, run softmax, and convert back."""
    layout = Layout(micro_batch=samples, precision="bf16", kernels="softmax")
    experiment = tiny(layout, replace(LONG, layers=1))
    step = trace(experiment, roles(experiment)[0]).step
    starts = [i for i, event in enumerate(step) if isinstance(event, PhaseStart)]
    forward = [event for event in step[: starts[1]] if isinstance(event, Operator)]
    names = Counter(event.name for event in forward)
    assert (names["repro.causal_softmax"], names["aten._softmax"]) == (fused, not fused)
    if not fused:
        scores, mask = samples * LONG.heads * LONG.seq**2, LONG.seq**2
        unfused = [
            e for e in forward if e.read >= 2 * scores and e.written >= 2 * scores and e.name not in MATMULS
        ]
        assert sum(e.read + e.written for e in unfused) == 36 * scores + mask
