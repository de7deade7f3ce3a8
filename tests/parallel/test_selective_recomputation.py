"""Tests of selective recomputation (2205.05198 sec. 5): keys, bitwise results, retained bytes and operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from repro.config import ConfigError, Layout, Model
from repro.config.files import build_dataclass
from repro.config.words import describe_layout, layout_options
from repro.model.counts import hardware_flops, model_flops
from repro.parallel.zero_r.activation_checkpointing import recompute_attention
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import Trace, roles, trace
from tests.pool import RankPool
from tests.training import FEW, Trained, smallest, tiny, train

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SOFTMAX = Layout(micro_batch=2, global_batch=8, kernels="softmax")


def test_words_of_recompute_equal_boolean_values() -> None:
    """Records store `none` and `block` as false and true."""
    for word, value in (("none", False), ("block", True), ("selective", "selective")):
        assert Layout(recompute=word) == Layout(recompute=value)
        assert asdict(build_dataclass(Layout, {"recompute": word}))["recompute"] == value
    assert [Layout(recompute=word).has_checkpoints for word in ("none", "selective", "block")] == [0, 0, 1]


@pytest.mark.parametrize("value", ["full", "yes", 1, 0, 0.5])
def test_other_values_of_recompute_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="recompute = "):
        build_dataclass(Layout, {"recompute": value})


@pytest.mark.parametrize(
    ("keys", "engine", "message"),
    [
        ({"tp": 2, "pa": True}, "native", "pa = true: needs recompute = true"),
        ({"pa_cpu": True}, "native", "pa_cpu = true: needs recompute = true"),
        ({"cp": 2}, "native", "cp = 2: must be 1 with recompute = selective"),
        ({}, "native", "recompute = 'selective': must be none or block, since fused attention stores"),
        ({}, "torch", "recompute = 'selective': must be false or true with engine torch"),
        ({"kernels": "softmax"}, "deepspeed", "recompute = 'selective': must be false or true with engine d"),
    ],
)
def test_unsupported_combinations_are_refused(keys: dict[str, object], engine: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(Layout(**keys, recompute="selective"), engine=engine)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_and_options_show_selective_recomputation() -> None:
    layout = replace(SOFTMAX, recompute="selective")
    assert "selective recomputation" in describe_layout(layout)
    assert "--recompute-selective" in layout_options(layout, "fp32").split()
    assert "--recompute" in layout_options(replace(layout, recompute=True), "fp32").split()


def assert_bitwise_equal(pool: RankPool | None, layout: Layout, model: Model | None = None) -> None:
    """Check that losses, gradient norms and parameters with dropout equal those without recomputation on all ranks."""
    model = model or smallest(layout)

    def trained(recompute: str) -> list[Trained]:
        experiment = tiny(replace(layout, recompute=recompute), model, **FEW, **DROPOUT)
        return pool.run(train, experiment) if pool else [train(experiment)]

    for found, expected in zip(trained("selective"), trained("none"), strict=True):
        assert found.loss == expected.loss
        assert found.norm == expected.norm
        assert found.parameters.keys() == expected.parameters.keys()
        for name, value in found.parameters.items():
            assert torch.equal(value, expected.parameters[name]), name


ALIBI = Model(name="bloom", layers=2, hidden=32, heads=4, vocab=96, seq=16, positions="alibi")
GROUPED = Model(
    name="grouped", layers=2, hidden=32, heads=4, vocab=96, seq=16, positions="rotary", kv_heads=2
)


@pytest.mark.parametrize(
    ("kernels", "precision"), [("softmax", "bf16"), ("unfused", "fp32"), ("fused", "bf16")]
)
def test_one_rank_has_bitwise_equal_results(kernels: str, precision: str) -> None:
    """`fused` also writes the scores, because training drops attention weights."""
    assert_bitwise_equal(None, replace(SOFTMAX, kernels=kernels, precision=precision))


@pytest.mark.parametrize("model", [ALIBI, GROUPED], ids=lambda model: model.name)
def test_other_models_have_bitwise_equal_results(model: Model) -> None:
    assert_bitwise_equal(None, SOFTMAX, model)


LAYOUTS = {
    "tp": replace(SOFTMAX, tp=2),
    "interleaved": replace(SOFTMAX, pp=2, schedule="interleaved", chunks=2),
    "zero2": replace(SOFTMAX, dp=2, zero=2, kernels="unfused", precision="bf16"),
    "zero3": replace(SOFTMAX, dp=2, zero=3, precision="fp16"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_have_bitwise_equal_results(two: RankPool, name: str) -> None:
    assert_bitwise_equal(two, LAYOUTS[name])


def test_four_ranks_have_bitwise_equal_results(four: RankPool) -> None:
    assert_bitwise_equal(four, replace(SOFTMAX, tp=2, sp=True, pp=2, micro_batch=1))


def test_recomputed_attention_retains_only_its_inputs() -> None:
    """Attention runs once in forward, without gradients, and once in backward."""
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    q, k, v = (torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3))
    y = recompute_attention(attend, q, k, v)
    assert [x.data_ptr() for x in y.grad_fn.saved_tensors] == [x.data_ptr() for x in (q, k, v)]  # type: ignore[union-attr]
    found = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert calls == [False, True]
    expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    assert all(map(torch.equal, found, expected))


LONG = Model(name="long", layers=3, hidden=16, heads=2, vocab=32, seq=256)
SCORES = 2 * 2 * 256 * 256 * 2
"""Bytes of a layer's scores of two samples in 16 bits."""


def step_trace(recompute: str, kernels: str) -> Trace:
    layout = Layout(micro_batch=2, kernels=kernels, recompute=recompute, precision="bf16")
    experiment = tiny(layout, LONG, **DROPOUT)
    return trace(experiment, roles(experiment)[0])


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_selective_recomputation_retains_no_scores(kernels: str) -> None:
    """Without recomputation, each layer retains the softmax and the weights after dropout until its backward pass."""
    peaks = {
        word: measure_live_bytes(step_trace(word, kernels).events).most["activations"]
        for word in ("none", "selective")
    }
    # With both values, the last layer has scores during its forward pass.
    layers = LONG.layers - 1
    assert peaks["none"] - peaks["selective"] == pytest.approx(layers * 2 * SCORES, rel=0.1)


def test_backward_repeats_only_the_operators_of_attention() -> None:
    def operators(word: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for times, operator in step_trace(word, "softmax").operators():
            assert isinstance(operator, Operator)
            found[operator.name] += times
        return found

    repeated = operators("selective") - operators("none")
    assert repeated.pop("aten.bmm") == 2 * LONG.layers
    assert repeated.pop("repro.causal_softmax") == LONG.layers
    assert repeated.pop("repro.bias_dropout_residual") == LONG.layers
    assert set(repeated) <= {"aten.clone", "aten.detach"}, "batched products copy the samples"
    assert not operators("none") - operators("selective")


def test_hardware_flops_count_the_repeated_products() -> None:
    def batched_flops(word: str) -> int:
        operators = step_trace(word, "softmax").operators()
        return sum(times * operator.flops for times, operator in operators if operator.name == "aten.bmm")

    counted = hardware_flops(LONG, LONG.seq, 2, "selective") - model_flops(LONG, LONG.seq, 2)
    assert batched_flops("selective") - batched_flops("none") == counted > 0
