"""Tests that every layout trains layers other than GPT-2's as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.model.counts import total_parameters
from tests.parallel.test_parity import BATCH, DROPOUT, UNIT, alone, assert_parity, assert_same, name_of
from tests.pool import RankPool
from tests.training import TINY, tiny, train

GROUPED_KEYS = {"kv_heads": 2, "biases": "none", "tied": False}
RMS_NORM = {"norm": "rms", "norm_eps": 1e-6}
LLAMA: dict[str, Any] = {"positions": "rotary", "mlp": "swiglu", "ffn": 48} | GROUPED_KEYS | RMS_NORM
NEOX = {"positions": "rotary", "rotary_fraction": 0.25, "blocks": "parallel", "tied": False}
BLOOM = {"positions": "alibi", "embedding_norm": True}
ONE_NORM = {"blocks": "parallel-one-norm", "mlp": "gelu-erf"}
FALCON = ONE_NORM | {"positions": "rotary", "kv_heads": 1, "biases": "none"}
FAMILIES = {
    name: replace(TINY, name=name, layers=2, **keys)
    for name, keys in {
        "llama": LLAMA,
        "qwen": {**LLAMA, "biases": "qkv", "tied": True},
        "neox": NEOX,
        "bloom": BLOOM,
        "falcon": FALCON,
        # No published family: biases of SwiGLU and of grouped keys, GELU without biases, ALiBi with grouped keys.
        "biased": {**LLAMA, "biases": "all", "norm": "layer"},
        "plain": {"biases": "none", "positions": "alibi", "kv_heads": 2},
    }.items()
}
FAST: dict[str, Any] = {"steps": 3, "untimed_steps": 1, "lr": 1e-2, "warmup_steps": 1, "eps": 1e-5}
TP2 = Layout(tp=2, micro_batch=4, global_batch=BATCH)
TP2_SP = Layout(tp=2, sp=True, micro_batch=BATCH, recompute=True)
DP2_Z3 = Layout(dp=2, zero=3, micro_batch=4, recompute=True)
PP2 = Layout(pp=2, zero=1, micro_batch=2, global_batch=BATCH)
FOUR_RANKS = Layout(tp=2, dp=2, zero=2, sp=True, micro_batch=4, global_batch=BATCH, recompute=True)


@pytest.mark.parametrize(
    ("layout", "family", "training"),
    [
        *((TP2_SP, family, {}) for family in ("llama", "neox")),
        *((DP2_Z3, family, {}) for family in ("llama", "bloom")),
        *((PP2, family, {}) for family in ("qwen", "bloom")),
        *((FOUR_RANKS, family, DROPOUT) for family in ("qwen", "falcon", "biased", "plain")),
        # More tp ranks than heads of keys and values.
        (replace(TP2, tp=4), "falcon", {}),
        (replace(TP2_SP, tp=4, recompute=False), "biased", {}),
        (replace(DP2_Z3, tp=2), "plain-one-head", {}),
    ],
    ids=name_of,
)
def test_every_layout_equals_one_process(
    request: pytest.FixtureRequest, layout: Layout, family: str, training: dict[str, float]
) -> None:
    model = FAMILIES[family] if family in FAMILIES else replace(FAMILIES["plain"], kv_heads=1)
    expected = alone(model=model, **FAST, **training)
    assert expected.loss[-1] < 0.995 * expected.loss[0], "the loss must fall, or parity proves little"
    assert sum(p.numel() for p in expected.parameters.values()) == total_parameters(model)
    # With dropout, the order of summation dominates the distance of a small bias.
    assert_parity(request, layout, model, parameters=3e-5 if training else 1e-5, **FAST, **training)


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_rotary_and_alibi_train_longer_samples(request: pytest.FixtureRequest, family: str) -> None:
    """Samples have 4 times the model's sequence length; context parallelism trains them as one process does."""
    model = FAMILIES[family]
    layout = Layout(cp=2, micro_batch=4, global_batch=BATCH)
    assert_parity(request, layout, model, **FAST, seq=4 * model.seq)
    assert f"exceed the model's sequence length of {model.seq}" in model.longer_sequence_note(4 * model.seq)
    assert model.longer_sequence_note(model.seq) == ""


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon", "biased"])
def test_softmax_kernels_equal_fused_attention(family: str) -> None:
    """Megatron-LM's operators of 2020 write the scores to memory."""
    layout = Layout(micro_batch=BATCH, kernels="softmax")
    for training in (FAST, {**FAST, **DROPOUT}):
        found = train(tiny(layout, FAMILIES[family], **training))
        assert_same([found], alone(model=FAMILIES[family], **training), 1e-5, 1e-5)


def test_each_model_key_changes_the_loss() -> None:
    """A key that the model ignores would pass every comparison of layouts."""
    keys: dict[str, Any] = {"positions": "rotary", "kv_heads": 2, "mlp": "swiglu", "biases": "qkv"}
    base = replace(TINY, name="keys", layers=1, **keys)
    others: dict[str, list[Any]] = {
        "norm": ["rms"],
        "norm_eps": [1e-2],
        "embedding_norm": [True],
        "positions": ["alibi", "learned"],
        "rotary_base": [50.0],
        "rotary_fraction": [0.5],
        "mlp": ["gelu-erf", "gelu"],
        "kv_heads": [1, 0],
        "biases": ["none", "all"],
        "tied": [False],
        "blocks": ["parallel", "parallel-one-norm"],
    }
    training: dict[str, Any] = {"steps": 2, "lr": 1e-2, "warmup_steps": 0, "untimed_steps": 1}
    models = [base, *(replace(base, **{key: value}) for key in others for value in others[key])]
    losses = {f"{alone(model=model, **training).loss[-1]:.7f}" for model in models}
    assert len(losses) == len(models) == 17


CP2 = Layout(cp=2, zero=1, micro_batch=BATCH)


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [("llama", TP2_SP, "bf16"), ("bloom", TP2_SP, "fp16"), ("llama", CP2, "bf16"), ("llama", CP2, "fp16")],
    ids=name_of,
)
def test_16_bit_losses_equal_one_process(two: RankPool, family: str, layout: Layout, precision: str) -> None:
    unit, model = UNIT[precision], FAMILIES[family]
    loss = two.run(train, tiny(replace(layout, precision=precision), model, **FAST))[0].loss
    torch.testing.assert_close(loss, alone(precision, model, **FAST).loss, rtol=4 * unit, atol=0.0)
    torch.testing.assert_close(loss, alone(model=model, **FAST).loss, rtol=16 * unit, atol=0.0)
