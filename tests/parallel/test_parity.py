"""Tests that losses and parameters of every layout equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from repro.config import Layout, Model
from tests.engines.needs import needs
from tests.pool import pool_of
from tests.training import LEARNING, TINY, Trained, smallest, tiny, train

BATCH = 8
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative rounding error of each 16-bit data type."""

DP2 = Layout(dp=2, micro_batch=4, global_batch=BATCH)
DP4 = Layout(dp=4, micro_batch=2, global_batch=BATCH)
TP2_DP2 = replace(DP2, tp=2)
TP2 = Layout(tp=2, micro_batch=BATCH)


def name_of(value: object) -> str | None:
    """Return the settings of a layout that differ from the defaults, for the id of its test."""
    if not isinstance(value, Layout):
        return None
    batches = ("micro_batch", "global_batch")
    settings = {key: getattr(value, key) for key in vars(Layout()) if key not in batches}
    return "-".join(f"{key}={word}" for key, word in settings.items() if word != getattr(Layout(), key))


@cache
def alone(precision: str = "fp32", model: Model = TINY, **training: float) -> Trained:
    """Train in one process with all samples in one micro-batch."""
    torch.set_num_threads(1)
    return train(tiny(Layout(micro_batch=BATCH, precision=precision), model, **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Check losses and parameters up to these relative distances; a parameter's distance is relative to its norm.

    Each rank has the parameters of its pipeline stage. Parameters of several ranks must be equal.
    """
    merged: dict[str, Tensor] = {}
    for trained in found:
        torch.testing.assert_close(trained.loss, expected.loss, rtol=loss, atol=0.0)
        torch.testing.assert_close(trained.norm, expected.norm, rtol=10 * loss, atol=0.0)
        for name, value in trained.parameters.items():
            torch.testing.assert_close(value, merged.setdefault(name, value), rtol=1e-6, atol=1e-7)
    assert merged.keys() == expected.parameters.keys()
    for name, reference in expected.parameters.items():
        distance = (merged[name].float() - reference.float()).norm() / reference.float().norm().clamp(
            min=1e-3
        )
        assert distance <= parameters, f"{name}: {distance}"


def assert_parity(
    request: pytest.FixtureRequest,
    layout: Layout,
    model: Model | None = None,
    *,
    parameters: float = 1e-5,
    **training: float,
) -> list[Trained]:
    """Train on the ranks of a layout, check that the results equal those of one process, and return them."""
    model = model or smallest(layout)
    found: list[Trained] = pool_of(request, layout).run(train, tiny(layout, model, **training))
    assert_same(found, alone(model=model, **training), 1e-5, parameters)
    return found


def relative_distance(found: Trained, expected: Trained) -> float:
    """Return the relative distance of the parameters in `found`, as one vector, from those in `expected`."""
    values, reference = (
        torch.cat([trained.parameters[name].float().flatten() for name in found.parameters])
        for trained in (found, expected)
    )
    return float((values - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    "layout",
    [
        *(replace(DP4, zero=z) for z in range(4)),
        replace(DP2, zero=1, zero1_reduce="all-reduce"),
        replace(TP2_DP2, zero=2, sp=True),
        replace(TP2, tp=4),
        replace(TP2, tp=4, sp=True),
        replace(TP2_DP2, gradient_as_bucket_view=False),
    ],
    ids=name_of,
)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    expected = alone(model=smallest(layout), **LEARNING)
    assert expected.loss[-1] < 0.9 * expected.loss[0], "the loss must fall, or parity proves little"
    assert sum(norm > 0.3 for norm in expected.norm) > 6, "clipping must act, or a wrong norm has no effect"
    assert_parity(request, layout, **LEARNING)


@pytest.mark.parametrize(
    "layout",
    [replace(DP2, zero=1), replace(DP2, zero=2), TP2, replace(TP2_DP2, zero=3, sp=True)],
    ids=name_of,
)
def test_all_options_together_equal_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The options are recomputation, accumulation, small buckets and dropout."""
    layout = replace(layout, recompute=True, bucket_bytes=3000, micro_batch=layout.micro_batch // 2)
    assert_parity(request, layout, steps=4, **DROPOUT)


@pytest.mark.parametrize(
    "layout",
    [
        replace(DP2, precision="bf16"),
        replace(TP2_DP2, zero=2, precision="bf16", cb=False, recompute=True, pa=True, pa_cpu=True, md=True),
        replace(TP2_DP2, zero=3, precision="bf16"),
        replace(DP2, gradient_as_bucket_view=False, precision="fp16"),
        replace(TP2_DP2, zero=1, precision="fp16"),
        replace(DP2, zero=2, precision="fp16"),
        replace(DP2, zero=3, precision="fp16"),
    ],
    ids=name_of,
)
def test_mixed_precision_equals_one_process_within_its_rounding(
    request: pytest.FixtureRequest, layout: Layout
) -> None:
    """Gradients are summed in 16 bits, so the vector of all parameters is compared.

    Biases that start at zero contain mainly the rounding errors of their gradients.
    """
    unit, model = UNIT[layout.precision], smallest(layout)
    expected = alone(layout.precision, model, steps=6)
    for trained in pool_of(request, layout).run(train, tiny(layout, model, steps=6)):
        torch.testing.assert_close(trained.loss, expected.loss, rtol=4 * unit, atol=0.0)
        assert trained.parameters.keys() == expected.parameters.keys()
        assert relative_distance(trained, expected) <= 4 * unit
        assert (trained.skipped, trained.scale) == (expected.skipped, expected.scale)


@needs("torch")
def test_one_process_equals_engine_torch() -> None:
    """Engine torch runs torch's modules, autograd and `torch.optim.AdamW`."""
    assert_same([alone()], train(tiny(Layout(micro_batch=BATCH), engine="torch")), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_of_padding_only_do_not_change_training(request: pytest.FixtureRequest, zero: int) -> None:
    """Under stages 1 and 2, two of four ranks have only padding. Under stage 3, some shards contain padding."""
    thin = Model(name="thin", layers=2, hidden=2, heads=2, vocab=8, seq=4)
    assert_parity(request, replace(DP4, zero=zero, bucket_bytes=16), thin, steps=5)
