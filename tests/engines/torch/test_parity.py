"""Parity tests: each strategy of torch trains like one process of engine native."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.engines.runs import pool_of
from tests.parallel.test_parity import BATCH, alone
from tests.training import LEARNING, Trained, smallest, tiny, train

pytestmark = needs("torch")
COSINE: dict[str, Any] = {**LEARNING, "schedule": "cosine", "min_lr": 3e-4}
"""Training in which weights change as in 20 steps with the default rate."""
DROPOUT: dict[str, Any] = {"steps": 6, "dropout": 0.1, "attention_dropout": 0.1, "clip": 1e3}
"""Training with dropout, whose gradient norms stay below the clipping limit."""
FP16: dict[str, Any] = {"steps": 6, "loss_scale": 2.0**12, "loss_scale_hysteresis": 1}


def build(**settings: Any) -> Layout:
    """Return a layout of two micro-batches per replica, or of four with a pipeline."""
    replica = BATCH // settings.get("dp", 1)
    return Layout(micro_batch=replica // (4 if "pp" in settings else 2), global_batch=BATCH, **settings)


INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "chunks": 2}
FP32 = {
    **{f"z{zero}": build(dp=2, zero=zero, recompute=zero in (1, 3)) for zero in range(4)},
    "ddp-copies": build(dp=2, gradient_as_bucket_view=False),
    "tp": build(tp=2),
    "tp-sp": build(tp=2, sp=True, recompute=True),
    "gpipe": build(pp=2, schedule="gpipe"),
    "1f1b": build(pp=2, recompute=True),
    "interleaved": build(**INTERLEAVED),
    "separate-ends": build(stage_layers=(0, 1, 1, 0), **INTERLEAVED),
    "dp-tp-sp": build(dp=2, tp=2, sp=True),
    "dp-tp-z3": build(dp=2, tp=2, zero=3),
    "dp-pp": build(dp=2, pp=2),
    "dp-pp-z2": build(dp=2, pp=2, zero=2),
    "tp-sp-interleaved": build(tp=2, sp=True, **INTERLEAVED),
}
"""Two ranks test each axis; on four ranks, one FSDP and one pipeline layout are fast."""
SLOW = ("dp-tp-sp", "dp-pp", "tp-sp-interleaved")


def run(request: pytest.FixtureRequest, layout: Layout, **training: Any) -> list[Trained]:
    return pool_of(request, layout).run(train, tiny(layout, smallest(layout), "torch", **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Compare losses, norms (10 times the tolerance) and each rank's parameters as one vector."""
    assert {name for trained in found for name in trained.parameters} == expected.parameters.keys()
    for trained in found:
        for values, target, tolerance in (
            (trained.loss, expected.loss, loss),
            (trained.norm, expected.norm, 10 * loss),
        ):
            torch.testing.assert_close(torch.tensor(values), torch.tensor(target), rtol=tolerance, atol=0.0)
        names = list(trained.parameters)
        target = torch.cat([expected.parameters[name].float().flatten() for name in names])
        values = torch.cat([trained.parameters[name].float().flatten() for name in names])
        assert (values - target).norm() <= parameters * target.norm()
        assert trained.skipped == expected.skipped


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FP32]
)
def test_fp32_training_agrees_with_one_process(request: pytest.FixtureRequest, name: str) -> None:
    expected = alone(model=smallest(FP32[name]), **COSINE)
    assert expected.loss[-1] < 0.95 * expected.loss[0], "the loss must fall, or parity proves little"
    assert_same(run(request, FP32[name], **COSINE), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["z3", "tp-sp", "interleaved", "z0"])
def test_dropout_drops_the_elements_of_one_process(request: pytest.FixtureRequest, name: str) -> None:
    """Recomputation drops the same elements again."""
    layout = replace(FP32[name], recompute=FP32[name].recompute or name == "z0")
    expected = alone(model=smallest(layout), **DROPOUT)
    assert_same(run(request, layout, **DROPOUT), expected, 1e-5, 1e-5)


CASES_16_BIT = [(name, "fp16") for name in ("z0", "z1", "z3", "tp-sp", "1f1b", "dp-pp")]
CASES_16_BIT += [("z0", "bf16"), ("z3", "bf16")]
SLOW_16_BIT = [
    pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("z1", "tp-sp", "1f1b", "dp-pp")
]


@pytest.mark.parametrize(("name", "precision"), [*CASES_16_BIT, *SLOW_16_BIT])
def test_16_bit_losses_are_close(request: pytest.FixtureRequest, name: str, precision: str) -> None:
    """The tolerance is a few units in the last place, because torch rounds at other operations."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    training = FP16 if precision == "fp16" else {"steps": FP16["steps"]}
    expected = alone(precision, smallest(FP32[name]), **training)
    found = run(request, replace(FP32[name], precision=precision), **training)
    assert_same(found, expected, 4 * unit, 4 * unit)
    assert all(trained.scale == expected.scale for trained in found)


@pytest.mark.parametrize("name", ["z1", "z2", "z3", "tp-sp", "interleaved", "dp-tp-sp"])
def test_overflow_skips_the_step_on_all_ranks(request: pytest.FixtureRequest, name: str) -> None:
    """GradScaler halves the scale, which is too large, at each step; the initial parameters of engine native remain."""
    training = {**FP16, "loss_scale": 2.0**60, "steps": 3, "untimed_steps": 1}
    engine = build_engine(
        tiny(Layout(), smallest(FP32[name])), meshes.single_rank_mesh(), torch.device("cpu")
    )
    start = engine.full_parameters()
    ranks = run(request, replace(FP32[name], precision="fp16"), **training)
    assert {key for trained in ranks for key in trained.parameters} == start.keys()
    for trained in ranks:
        assert trained.skipped == [0, 1, 2]
        assert trained.scale == [2.0**60, 2.0**59, 2.0**58]
        assert all(torch.equal(value, start[key]) for key, value in trained.parameters.items())
