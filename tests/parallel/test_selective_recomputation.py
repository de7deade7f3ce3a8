"""Tests of selective recomputation (2205.05198 sec. 5): keys, bitwise results and operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from repro.config import ConfigError, Layout, Model
from repro.config.files import build_dataclass
from repro.config.words import describe_layout, layout_options
from repro.model.counts import hardware_flops, model_flops
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_operator_sets import LONG
from tests.parallel.test_parity import DROPOUT, name_of
from tests.pool import pool_of
from tests.training import FEW, TINY, tiny, train

SOFTMAX = Layout(micro_batch=2, global_batch=8, kernels="softmax")


def test_words_of_recompute_equal_boolean_values() -> None:
    """Records store `none` and `block` as false and true."""
    for word, value in (("none", False), ("block", True), ("selective", "selective")):
        assert Layout(recompute=word) == Layout(recompute=value)
        assert asdict(build_dataclass(Layout, {"recompute": word}))["recompute"] == value
        assert Layout(recompute=word).has_checkpoints == (word == "block")
    for invalid in ("full", "yes", 1, 0, 0.5):
        with pytest.raises(ConfigError, match="recompute = "):
            build_dataclass(Layout, {"recompute": invalid})


def test_labels_and_options_show_selective_recomputation() -> None:
    layout = replace(SOFTMAX, recompute="selective")
    assert "selective recomputation" in describe_layout(layout)
    assert "--recompute-selective" in layout_options(layout, "fp32").split()
    assert "--recompute" in layout_options(replace(layout, recompute=True), "fp32").split()


SMALL = replace(TINY, layers=2)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        # `fused` also writes the scores, because training drops attention weights.
        (replace(SOFTMAX, kernels="fused", precision="bf16"), SMALL),
        (replace(SOFTMAX, kernels="unfused"), SMALL),
        (SOFTMAX, replace(SMALL, name="alibi", positions="alibi")),
        (SOFTMAX, replace(SMALL, name="grouped", positions="rotary", kv_heads=2)),
        (replace(SOFTMAX, tp=2), SMALL),
        (replace(SOFTMAX, pp=2, schedule="interleaved", chunks=2), TINY),
        (replace(SOFTMAX, dp=2, zero=2, kernels="unfused", precision="bf16"), SMALL),
        (replace(SOFTMAX, dp=2, zero=3, precision="fp16"), SMALL),
        (replace(SOFTMAX, tp=2, sp=True, pp=2, micro_batch=1), SMALL),
    ],
    ids=name_of,
)
def test_results_are_bitwise_equal(request: pytest.FixtureRequest, layout: Layout, model: Model) -> None:
    """Losses, gradient norms and parameters with dropout equal those without recomputation on all ranks."""
    selective, expected = (
        [train(experiment)] if layout.world == 1 else pool_of(request, layout).run(train, experiment)
        for recompute in ("selective", "none")
        for experiment in [tiny(replace(layout, recompute=recompute), model, **FEW, **DROPOUT)]
    )
    for found, other in zip(selective, expected, strict=True):
        assert (found.loss, found.norm) == (other.loss, other.norm)
        torch.testing.assert_close(found.parameters, other.parameters, rtol=0, atol=0)


DEEP = replace(LONG, layers=3)


def test_backward_repeats_only_the_operators_of_attention() -> None:
    """The hardware's FLOP count the repeated products."""
    names: dict[str, Counter[str]] = {}
    batched_flops: dict[str, int] = {}
    for word in ("selective", "none"):
        layout = Layout(micro_batch=2, kernels="softmax", recompute=word, precision="bf16")
        experiment = tiny(layout, DEEP, **DROPOUT)
        names[word], batched_flops[word] = Counter(), 0
        for times, operator in trace(experiment, roles(experiment)[0]).operators():
            names[word][operator.name] += times
            batched_flops[word] += times * operator.flops if operator.name == "aten.bmm" else 0
    repeated = names["selective"] - names["none"]
    assert repeated.pop("aten.bmm") == 2 * DEEP.layers
    assert repeated.pop("repro.causal_softmax") == DEEP.layers
    assert repeated.pop("repro.bias_dropout_residual") == DEEP.layers
    assert set(repeated) <= {"aten.clone", "aten.detach"}, "batched products copy the samples"
    assert not names["none"] - names["selective"]
    counted = hardware_flops(DEEP, DEEP.seq, 2, "selective") - model_flops(DEEP, DEEP.seq, 2)
    assert batched_flops["selective"] - batched_flops["none"] == counted > 0
