"""Tests that similarity rules preserve ratios of compute to communication, and of layouts on fewer ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from repro.accuracy.twins.scaling import Scale, TwinShape, scaled_model, shape_of
from repro.config import ConfigError, Layout, Model, systems
from repro.config.layout import ELEMENT_BYTES
from repro.config.system import System
from repro.model import counts
from repro.parallel.ledger import RING_PASSES

CASES = 50


def tp_ratio(hidden: float, tokens: float, layout: Layout, rate: float, link: float) -> float:
    """Return seconds of a layer's products / seconds of its six all-reduces over tp, with recomputation."""
    products = 8 / 2 * 24 * tokens * hidden**2 / 2 / layout.tp / rate
    hops = RING_PASSES["all_reduce"] * (layout.tp - 1) / layout.tp
    return products / (6 * hops * tokens * hidden * ELEMENT_BYTES[layout.precision] / link)


def dp_ratio(hidden: float, tokens: float, layout: Layout, rate: float, link: float) -> float:
    """Return seconds of a layer's products / seconds of an all-reduce of its gradients."""
    products = 4 * 24 * tokens * hidden**2 / layout.tp / rate
    hops = RING_PASSES["all_reduce"] * (layout.dp - 1) / layout.dp
    return products / (hops * 12 * hidden**2 * layout.grad_bytes / layout.tp / link)


@pytest.mark.parametrize("seed", range(CASES))
def test_scale_preserves_tp_and_dp_ratios(seed: int) -> None:
    """Widths, tokens, degrees and rates are random. With equal degrees, both links have one factor."""
    pick = random.Random(seed)
    before = Layout(tp=pick.choice([2, 4, 8, 16]), dp=pick.choice([2, 4, 8, 64]), precision="fp16")
    fixed = pick.random() < 0.5
    tp, dp = (before.tp, before.dp) if fixed else (pick.choice([2, 4]), pick.choice([2, 4]))
    after = Layout(tp=tp, dp=dp)
    hidden, seq = 8 * pick.randint(100, 2500), 64 * pick.randint(8, 64)
    k = 1 / pick.choice([2, 4, 8, 16])
    fast, slow, link = pick.uniform(1e12, 1e14), pick.uniform(1e9, 1e11), pick.uniform(1e9, 1e10)
    has_fp32_gradients = pick.random() < 0.3
    before = replace(before, grad_dtype="fp32") if has_fp32_gradients else before
    scale, links = Scale(width=k, tokens=k, element=2.0, rate=slow / fast), {}
    for name, ratio, factor in (
        ("tp", tp_ratio, scale.tp_link(before, after)),
        ("dp", dp_ratio, scale.dp_link(before, after)),
    ):
        links[name] = factor
        original = ratio(hidden, 8 * seq, before, fast, link)
        twin = ratio(hidden * k, 8 * seq * k, after, slow, link * factor)
        assert twin == pytest.approx(original, rel=1e-9), name
    if fixed:
        assert links["tp"] == pytest.approx(links["dp"] * (2 if has_fp32_gradients else 1))
        assert links["tp"] == pytest.approx(slow / fast * 2 / k)


@pytest.mark.parametrize("seed", range(CASES))
def test_scaled_model_preserves_attention_and_vocabulary_shares(seed: int) -> None:
    pick = random.Random(seed)
    layers, hidden, seq = pick.randint(16, 128), 128 * pick.randint(12, 96), 1024 * pick.choice([1, 2])
    original = Model(name="o", layers=layers, hidden=hidden, heads=32, vocab=51_200, seq=seq)
    tp = pick.choice([1, 2, 4])
    twin = scaled_model(original, original.seq, name="t", width=original.hidden // 4, layers=8, tp=tp)
    assert twin.seq / twin.hidden == pytest.approx(original.seq / original.hidden, rel=0.01)

    def vocabulary(model: Model) -> float:
        return counts.logits_forward(model, model.seq, 1) / counts.layers_forward(model, model.seq, 1)

    assert vocabulary(twin) == pytest.approx(vocabulary(original), rel=0.02)
    assert twin.heads % tp == twin.vocab % tp == twin.seq % tp == 0


def test_scale_preserves_the_ratio_of_stage_compute_to_messages() -> None:
    """The ratio of a stage's compute to its sent tensor is 96 h (l/p) W / (t e F)."""
    before = Layout(tp=8, pp=12, precision="fp16", sp=True)  # each tp rank sends an eighth of the tensor
    after = Layout(tp=4, pp=4)
    scale = Scale(width=1 / 32, tokens=1 / 32, element=2.0, rate=1e-4)

    def ratio(hidden: float, layers: int, layout: Layout, rate: float, link: float) -> float:
        stage = 96 * hidden**2 * layers / layout.pp / layout.tp / rate
        sent = hidden * ELEMENT_BYTES[layout.precision] / (layout.tp if layout.sp else 1)
        return stage / (sent / link)

    factor = scale.pp_link(before, after, (96, 4))
    original = ratio(12288, 96, before, 1e14, 1e10)
    assert ratio(384, 4, after, 1e10, 1e10 * factor) == pytest.approx(original)
    assert scale.pp_link(before, Layout(), (96, 4)) == 0


def test_models_with_other_layers_are_refused() -> None:
    model = Model(name="llama", layers=2, hidden=64, heads=8, vocab=64, seq=32, norm="rms", kv_heads=2)
    message = r"model = 'llama': must be a model with GPT-2's layer.* different norm"
    with pytest.raises(ConfigError, match=message):
        scaled_model(model, 32, name="twin", width=32, layers=2, tp=1)


DGX2, LOWBW, SELENE = map(systems.load_system_file, ("dgx2", "lowbw-v100", "selene"))


@pytest.mark.parametrize(
    ("layout", "system", "shape"),
    [
        (Layout(tp=4, dp=4, micro_batch=8), LOWBW, TwinShape(4, 4, 4, 1, 4)),  # the ranks suffice
        (Layout(tp=2, dp=32), DGX2, TwinShape(4, 4, 2, 1, 8)),
        (Layout(dp=64), DGX2, TwinShape(4, 4, 1, 1, 16)),
        (Layout(tp=4, dp=16), DGX2, TwinShape(4, 4, 4, 1, 4)),
        (Layout(tp=16, dp=4), DGX2, TwinShape(4, 4, 4, 1, 4)),  # one node per tp group, as in the original
        (Layout(tp=32), DGX2, TwinShape(2, 8, 16, 1, 1)),  # two nodes per tp group, as in the original
    ],
)
def test_twin_has_as_many_nodes_with_fewer_ranks(layout: Layout, system: System, shape: TwinShape) -> None:
    assert shape_of(layout, system, 16) == shape


def test_node_of_one_group_can_become_one_rank_and_stages_are_preserved() -> None:
    layout = Layout(tp=16, dp=8, micro_batch=48, zero=2, pa=True, recompute=True)
    shape = shape_of(layout, DGX2, 16, tp=1)
    assert shape == TwinShape(16, 1, 1, 1, 16)
    twin = shape.layout(layout)
    assert (twin.replica_batch, twin.pa, twin.precision) == (48, False, "fp32")
    layout = Layout(tp=8, pp=12, dp=4, micro_batch=1, global_batch=1536)
    with pytest.raises(ConfigError, match="nodes"):
        shape_of(layout, SELENE, 16)
    shape = shape_of(layout, SELENE, 48, tp=1)
    assert shape.layout(layout).accumulation == layout.accumulation
