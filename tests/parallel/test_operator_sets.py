"""Tests that all operator sets, with and without overlap of communication, train the same model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import repro
from repro.config import Layout, Model
from repro.config.engines import has_fused_softmax
from repro.engines import build_engine
from repro.model.operator_sets import _softmax_apart
from repro.parallel import mesh as meshes
from repro.simulate.time.device import MATMULS
from repro.simulate.trace.events import Message, Operator, PhaseStart, Wait
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_parity import BATCH, DROPOUT, UNIT, alone, assert_parity, assert_same, name_of
from tests.parallel.test_zero3_gather import count_calls
from tests.pool import RankPool
from tests.training import FEW, micro_batches, tiny, train
from tests.wrap.stock_models import BATCH as STOCK_BATCH
from tests.wrap.stock_models import train_stock
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


@pytest.mark.parametrize(("precision", "training"), [("fp32", DROPOUT), ("bf16", {}), ("fp16", {})])
def test_reference_kernels_equal_the_fused_kernels(precision: str, training: dict[str, float]) -> None:
    """Results are equal bit by bit, since both run the same code on a CPU."""
    layout = Layout(micro_batch=BATCH, precision=precision, kernels="reference")
    assert_same([train(tiny(layout, **training))], alone(precision, **training), 0.0, 0.0)


def test_two_layouts_in_one_process_run_their_own_kernels() -> None:
    """The steps of both layouts alternate, as in a comparison of experiments."""
    mesh, names = meshes.single_rank_mesh(), ("fused", "reference")
    experiments = [tiny(Layout(micro_batch=2, kernels=kernels), **DROPOUT) for kernels in names]
    engines = [build_engine(experiment, mesh, torch.device("cpu")) for experiment in experiments]
    for step in range(2):
        batches = micro_batches(experiments[0], 0, step)
        steps = (partial(engine.step, batches, lambda phase: None) for engine in engines)
        fused, reference = ({key for key in count_calls(work) if key.startswith("repro::")} for work in steps)
        assert fused >= {
            "repro::adamw_",
            "repro::norm_squared",
            "repro::layer_norm_backward",
            "repro::bias_gelu",
        }
        assert fused >= {"repro::cross_entropy_backward_", "repro::bias_dropout_residual_backward"}
        assert not reference


def test_simulated_step_of_reference_kernels_has_torchs_operators() -> None:
    """The simulator predicts memory and time from the temporaries and bytes of these operators."""
    fused, reference = (operators(kernels, **DROPOUT) for kernels in ("fused", "reference"))
    # torch's fused AdamW has no shape function. Its substitute also makes one pass over memory.
    assert {o.name for _, o in reference if o.name.startswith("repro.")} == {"repro.adamw_"}
    moved = [sum(n * (o.read + o.written) for n, o in found) for found in (reference, fused)]
    assert moved[0] > moved[1]


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
    last_backward = during[len(during) - during[::-1].index("backward") :]
    before_first = last_backward[: last_backward.index("send")]
    assert before_first.count("product") < last_backward.count("product") / 2
    assert during.count("send") >= overlapped.count("send") - 2, "all except those of the first layers"
    reductions = [event for event in found[: found.index("optimizer")] if event in ("send", "wait")]
    if zero == 2:
        assert "send" in before
        assert reductions == ["send", "wait"] * found.count("send")
    else:
        assert "send" not in before
        assert reductions.count("wait") == found.count("send")


def test_parameters_are_gathered_during_the_next_forward_or_at_the_end_of_the_step() -> None:
    """Without overlap, the step ends after the gathers of the updated parameters."""
    layout = Layout(dp=2, zero=2, bucket_bytes=3000)
    for blocking in ({"gather_overlap": False}, {"overlap": False}):
        found = issued(replace(layout, **blocking), "parameters")
        assert "wait" not in found[: found.index("optimizer")]
        assert found.count("send") == found.count("wait") > 4
    found = issued(layout, "parameters")
    waits = [i for i, event in enumerate(found) if event == "wait"]
    assert found.index("product") < waits[-1] < found.index("backward"), (
        "the first layers run before the last wait"
    )


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stock_module_without_overlap_equals_one_process(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, overlap=False, micro_batch=STOCK_BATCH // 2, bucket_bytes=600)
    assert_trained_like_one(two.run(train_stock, "tied", "adamw", layout), "tied", "adamw")


def operators(kernels: str, **training: float) -> list[tuple[int, Operator]]:
    """Return the operators of a traced step with their number of calls."""
    experiment = tiny(Layout(micro_batch=2, precision="fp16", kernels=kernels), LONG, **training)
    return [*trace(experiment, roles(experiment)[0]).operators()]


FUSED_SOFTMAX = {"repro.causal_softmax": 1, "repro.causal_softmax_backward": 1}
UNFUSED_SOFTMAX = {
    "aten.div": 2,
    "aten.mul": 2,
    "aten.sub": 1,
    "aten._softmax": 1,
    "aten._softmax_backward_data": 1,
}


@pytest.mark.parametrize(
    ("kernels", "expected", "expected_passes"),
    [
        ("fused", {}, 0),
        ("softmax", {"aten.bmm": 6, **FUSED_SOFTMAX}, 11),
        ("unfused", {"aten.bmm": 6, **UNFUSED_SOFTMAX}, 21),
    ],
)
def test_operator_sets_read_and_write_the_scores_as_expected(
    kernels: str, expected: dict[str, int], expected_passes: int
) -> None:
    """Expected are the operators of one layer that read or write its scores, and their reads and writes."""
    found: Counter[str] = Counter()
    passes = 0
    for times, operator in operators(kernels):
        times_read, times_written = operator.read // SCORES, operator.written // SCORES
        if times_read or times_written:
            found[operator.name] += times
            passes += times * (times_read + times_written)
    assert found == {name: LONG.layers * times for name, times in expected.items()}
    assert passes == LONG.layers * expected_passes


@pytest.mark.parametrize("kernels", ["fused", "softmax", "unfused"])
def test_dropout_of_attention_weights_is_one_operator(kernels: str) -> None:
    """Dropout of attention weights excludes fused attention, so the sets `fused` and `softmax` run equal operators."""
    found = [(n, o) for n, o in operators(kernels, **DROPOUT) if max(o.read, o.written) >= SCORES]
    dropouts = Counter(o.name for _, o in found if o.name.startswith("repro.bias_dropout"))
    name = "repro.bias_dropout_residual"
    assert dropouts == {name: LONG.layers, f"{name}_backward": LONG.layers}
    if kernels == "fused":
        softmax = [(n, o) for n, o in operators("softmax", **DROPOUT) if max(o.read, o.written) >= SCORES]
        assert sorted(map(str, found)) == sorted(map(str, softmax))
        assert max(o.written for _, o in found) < 2 * SCORES, "fp32 has twice these bytes"


def test_operators_outside_attention_are_fused_per_set() -> None:
    """Biases, GELU and residuals are one operator each. Dropout with probability 0 has no operator."""
    softmax, unfused = (Counter(o.name for _, o in operators(kernels)) for kernels in ("softmax", "unfused"))
    layers = LONG.layers
    assert softmax["repro.bias_gelu"] == unfused["aten.gelu"] == layers
    assert softmax["repro.bias_dropout_residual"] == 2 * layers
    assert unfused["repro.bias_dropout_residual"] == unfused["repro.bias_gelu"] == 0
    assert unfused["aten.add_"] - softmax["aten.add_"] == 2 * layers
    # Output bias and residual of attention and of the MLP.
    assert unfused["aten.add"] - softmax["aten.add"] == 4 * layers


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
