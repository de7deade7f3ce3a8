"""Selective recomputation (2205.05198 sec. 5): words of the layout, equal bits, retained bytes and operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from repro.config import ConfigError, Experiment, Layout, Model
from repro.config.files import build_dataclass
from repro.config.words import describe_layout, layout_options
from repro.model.counts import hardware_flops, model_flops
from repro.parallel.zero_r.activation_checkpointing import recompute_attention
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import roles, trace
from tests.pool import RankPool
from tests.training import FEW, Trained, smallest, tiny, train

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SOFTMAX = Layout(micro_batch=2, global_batch=8, kernels="softmax")


def test_the_words_are_the_values_of_before() -> None:
    """Files and records with true or false mean what they meant, and a word changes no key of a record."""
    for word, value in (("none", False), ("block", True), ("selective", "selective")):
        assert Layout(recompute=word) == Layout(recompute=value)
        assert asdict(build_dataclass(Layout, {"recompute": word}))["recompute"] == value
    assert [Layout(recompute=each).has_checkpoints for each in ("none", "selective", "block")] == [0, 0, 1]


@pytest.mark.parametrize("value", ["full", "yes", 1, 0, 0.5])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="recompute = "):
        build_dataclass(Layout, {"recompute": value})


@pytest.mark.parametrize(
    ("keys", "engine", "says"),
    [
        ({"tp": 2, "pa": True}, "native", "pa = true: needs recompute = true"),
        ({"pa_cpu": True}, "native", "pa_cpu = true: needs recompute = true"),
        ({"cp": 2}, "native", "cp = 2: must be 1 with recompute = selective"),
        ({}, "native", "recompute = 'selective': must be none or block, since fused attention stores"),
        ({}, "torch", "recompute = 'selective': must be false or true with engine torch"),
        ({"kernels": "softmax"}, "deepspeed", "recompute = 'selective': must be false or true with engine d"),
    ],
)
def test_refused_in_one_line(keys: dict[str, object], engine: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(Layout(**keys, recompute="selective"), engine=engine)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_for_people() -> None:
    layout = replace(SOFTMAX, recompute="selective")
    assert "selective recomputation" in describe_layout(layout)
    assert "--recompute-selective" in layout_options(layout, "fp32").split()
    assert "--recompute" in layout_options(replace(layout, recompute=True), "fp32").split()


def assert_equal_bits(pool: RankPool | None, layout: Layout, model: Model | None = None) -> None:
    """Losses, gradient norms and parameters of every rank equal those without recomputation, with dropout."""
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
def test_one_rank_has_the_same_bits(kernels: str, precision: str) -> None:
    """`fused` writes scores here as well, because it drops attention weights."""
    assert_equal_bits(None, replace(SOFTMAX, kernels=kernels, precision=precision))


@pytest.mark.parametrize("model", [ALIBI, GROUPED], ids=lambda model: model.name)
def test_other_layers_have_the_same_bits(model: Model) -> None:
    assert_equal_bits(None, SOFTMAX, model)


LAYOUTS = {
    "tp": replace(SOFTMAX, tp=2),
    "interleaved": replace(SOFTMAX, pp=2, schedule="interleaved", chunks=2),
    "zero2": replace(SOFTMAX, dp=2, zero=2, kernels="unfused", precision="bf16"),
    "zero3": replace(SOFTMAX, dp=2, zero=3, precision="fp16"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_processes_have_the_same_bits(two: RankPool, name: str) -> None:
    assert_equal_bits(two, LAYOUTS[name])


def test_four_processes_have_the_same_bits(four: RankPool) -> None:
    assert_equal_bits(four, replace(SOFTMAX, tp=2, sp=True, pp=2, micro_batch=1))


def test_attention_runs_once_forward_and_once_backward_and_retains_its_inputs_only() -> None:
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
"""Bytes of the scores of two samples in 16 bits."""


def long(recompute: str, kernels: str) -> Experiment:
    return tiny(
        Layout(micro_batch=2, kernels=kernels, recompute=recompute, precision="bf16"), LONG, **DROPOUT
    )


@pytest.mark.parametrize("kernels", ["softmax", "unfused"])
def test_no_layer_retains_its_scores(kernels: str) -> None:
    """Without recomputation each layer retains the softmax and the dropped weights until its backward pass."""
    most = {
        word: measure_live_bytes(trace(e := long(word, kernels), roles(e)[0]).events).most["activations"]
        for word in ("none", "selective")
    }
    # The last layer has its scores while it runs forward, under either word.
    others = LONG.layers - 1
    assert most["none"] - most["selective"] == pytest.approx(others * 2 * SCORES, rel=0.1)


def test_backward_repeats_the_operators_of_the_core_alone() -> None:
    def operators(word: str) -> Counter[str]:
        experiment = long(word, "softmax")
        found: Counter[str] = Counter()
        for times, operator in trace(experiment, roles(experiment)[0]).operators():
            assert isinstance(operator, Operator)
            found[operator.name] += times
        return found

    again = operators("selective") - operators("none")
    assert again.pop("aten.bmm") == 2 * LONG.layers
    assert again.pop("repro.causal_softmax") == LONG.layers
    assert again.pop("repro.bias_dropout_residual") == LONG.layers
    assert set(again) <= {"aten.clone", "aten.detach"}, "copies of several samples for batched products"
    assert not operators("none") - operators("selective")


def test_flops_are_those_of_the_repeated_products() -> None:
    def batched(word: str) -> int:
        experiment = long(word, "softmax")
        operators = trace(experiment, roles(experiment)[0]).operators()
        return sum(times * operator.flops for times, operator in operators if operator.name == "aten.bmm")

    counted = hardware_flops(LONG, LONG.seq, 2, "selective") - model_flops(LONG, LONG.seq, 2)
    assert batched("selective") - batched("none") == counted > 0
