"""Tests that every layout trains layers other than GPT-2's as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import ConfigError, Layout, engines
from repro.model.counts import total_parameters
from tests.parallel.test_parity import BATCH, alone, assert_same, name_of
from tests.pool import RankPool
from tests.training import TINY, Trained, tiny, train

LLAMA: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-6,
    "positions": "rotary",
    "mlp": "swiglu",
    "ffn": 48,
    "kv_heads": 2,
    "biases": "none",
    "tied": False,
}
NEOX = {"positions": "rotary", "rotary_fraction": 0.25, "blocks": "parallel", "tied": False}
BLOOM = {"positions": "alibi", "embedding_norm": True}
FALCON = {
    "positions": "rotary",
    "kv_heads": 1,
    "biases": "none",
    "blocks": "parallel-one-norm",
    "mlp": "gelu-erf",
}
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
TWO_RANKS = [
    Layout(tp=2, micro_batch=4, global_batch=BATCH),
    Layout(tp=2, sp=True, micro_batch=BATCH, recompute=True),
    Layout(dp=2, zero=3, micro_batch=4, recompute=True),
]
FOUR_RANKS = Layout(tp=2, dp=2, zero=2, sp=True, micro_batch=4, global_batch=BATCH, recompute=True)
REPLICATED = [Layout(tp=4, micro_batch=4, global_batch=BATCH), Layout(tp=4, sp=True, micro_batch=BATCH)]
"""Layouts with more tp ranks than heads of keys and values."""


def check_parity(pool: RankPool, layout: Layout, family: str, **settings: float) -> None:
    model, training = FAMILIES[family], {**FAST, **settings}
    expected = alone(model=model, **training)
    assert expected.loss[-1] < 0.995 * expected.loss[0], "the loss must fall, or parity proves little"
    assert sum(p.numel() for p in expected.parameters.values()) == total_parameters(model)
    # With dropout, the order of summation dominates the distance of a small bias.
    parameters = 3e-5 if training.get("dropout") else 1e-5
    assert_same(pool.run(train, tiny(layout, model, **training)), expected, 1e-5, parameters)


@pytest.mark.parametrize("layout", TWO_RANKS, ids=name_of)
@pytest.mark.parametrize("family", ["llama", "neox", "bloom", "falcon"])
def test_two_ranks_equal_one_process(two: RankPool, layout: Layout, family: str) -> None:
    check_parity(two, layout, family)


@pytest.mark.parametrize("family", ["qwen", "falcon", "biased", "plain"])
def test_four_ranks_with_dropout_equal_one_process(four: RankPool, family: str) -> None:
    check_parity(four, FOUR_RANKS, family, dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize(("family", "layout"), [("falcon", REPLICATED[0]), ("biased", REPLICATED[1])])
def test_tp_above_kv_heads_equals_one_process(four: RankPool, layout: Layout, family: str) -> None:
    check_parity(four, layout, family)


def test_replicated_keys_under_stage_3_equal_one_process(four: RankPool) -> None:
    """The model has one head of keys on both tp ranks, and ALiBi."""
    model = replace(FAMILIES["plain"], kv_heads=1)
    layout = Layout(tp=2, dp=2, zero=3, micro_batch=4, recompute=True)
    assert_same(four.run(train, tiny(layout, model, **FAST)), alone(model=model, **FAST), 1e-5, 1e-5)


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_models_without_learned_positions_train_longer_samples(two: RankPool, family: str) -> None:
    """Samples have 4 times the model's sequence length; context parallelism trains them as one process does."""
    model, training = FAMILIES[family], {**FAST, "seq": 4 * FAMILIES[family].seq}
    layout = Layout(cp=2, micro_batch=4, global_batch=BATCH)
    expected = alone(model=model, **training)
    assert_same(two.run(train, tiny(layout, model, **training)), expected, 1e-5, 1e-5)
    assert f"exceed the model's {model.seq}" in model.longer_sequence_note(training["seq"])
    assert model.longer_sequence_note(model.seq) == ""


def merge_stages(found: list[Trained]) -> Trained:
    """Return the last stage's results with the parameters of all stages."""
    parameters = {name: value for trained in found for name, value in trained.parameters.items()}
    return replace(found[-1], parameters=parameters)


@pytest.mark.parametrize("family", ["llama", "qwen", "bloom"])
def test_pipeline_stages_equal_one_process(two: RankPool, family: str) -> None:
    layout = Layout(pp=2, zero=1, micro_batch=2, global_batch=BATCH)
    found = merge_stages(two.run(train, tiny(layout, FAMILIES[family], **FAST)))
    assert_same([found], alone(model=FAMILIES[family], **FAST), 1e-5, 1e-5)


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon", "biased"])
def test_softmax_kernels_equal_fused_attention(family: str) -> None:
    """Megatron-LM's operators of 2020 write the scores to memory."""
    layout = Layout(micro_batch=BATCH, kernels="softmax")
    for dropout in ({}, {"dropout": 0.1, "attention_dropout": 0.1}):
        training = {**FAST, **dropout}
        expected = alone(model=FAMILIES[family], **training)
        assert_same([train(tiny(layout, FAMILIES[family], **training))], expected, 1e-5, 1e-5)


def test_each_model_key_changes_the_loss() -> None:
    """A key that the model ignores would pass every comparison of layouts."""
    keys: dict[str, Any] = {"positions": "rotary", "kv_heads": 2, "mlp": "swiglu", "biases": "qkv"}
    base = replace(TINY, name="keys", layers=1, **keys)
    others: dict[str, Any] = {
        "norm": "rms",
        "norm_eps": 1e-2,
        "embedding_norm": True,
        "positions": "alibi",
        "rotary_base": 50.0,
        "rotary_fraction": 0.5,
        "mlp": "gelu-erf",
        "kv_heads": 1,
        "biases": "none",
        "tied": False,
        "blocks": "parallel",
    }
    training: dict[str, Any] = {"steps": 2, "lr": 1e-2, "warmup_steps": 0, "untimed_steps": 1}
    models = [base, *(replace(base, **{key: value}) for key, value in others.items())]
    models += [replace(base, mlp="gelu"), replace(base, positions="learned"), replace(base, biases="all")]
    models += [replace(base, blocks="parallel-one-norm"), replace(base, kv_heads=0)]
    losses = [alone(model=model, **training).loss[-1] for model in models]
    assert len({f"{loss:.7f}" for loss in losses}) == len(losses)


@pytest.mark.parametrize(("family", "precision"), [("llama", "bf16"), ("bloom", "fp16"), ("falcon", "bf16")])
def test_16_bit_losses_equal_one_process(two: RankPool, family: str, precision: str) -> None:
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    model = FAMILIES[family]
    layout = Layout(tp=2, sp=True, micro_batch=BATCH, precision=precision)
    found = two.run(train, tiny(layout, model, **FAST))
    torch.testing.assert_close(found[0].loss, alone(precision, model, **FAST).loss, rtol=4 * unit, atol=0.0)
    fp32_loss = alone(model=model, **FAST).loss
    torch.testing.assert_close(found[0].loss, fp32_loss, rtol=16 * unit, atol=0.0)


@pytest.mark.parametrize(
    ("family", "layout", "engine", "message"),
    [
        (
            "llama",
            {"kernels": "unfused"},
            "native",
            "kernels = 'unfused': must be one of "
            "fused, fused-2024, fused-2026, megatron-2025, reference, softmax, torchtitan-2024, since operators of",
        ),
        (
            "bloom",
            {},
            "torch",
            "embedding_norm = true: must be the value of GPT-2, the only model of engine torch",
        ),
        (
            "neox",
            {},
            "megatron",
            "positions = 'rotary': must be the value of GPT-2, the only model of engine megatron",
        ),
        ("llama", {"tp": 4}, "deepspeed", "tp = 4: must be at most kv_heads = 2 with engine deepspeed"),
    ],
)
def test_unsupported_model_is_refused(family: str, layout: dict[str, Any], engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tiny(Layout(**layout), FAMILIES[family], engine, dropout=0, attention_dropout=0)
    assert "\n" not in str(error.value)


def test_tp_divides_or_is_a_multiple_of_kv_heads() -> None:
    model = replace(TINY, heads=12, hidden=48, kv_heads=3)
    engines.check_layout_fits(Layout(tp=3), model, model.seq)
    engines.check_layout_fits(Layout(tp=6), model, model.seq)
    with pytest.raises(ConfigError, match="tp = 2: must be a divisor or a multiple of kv_heads = 3"):
        engines.check_layout_fits(Layout(tp=2), model, model.seq)
