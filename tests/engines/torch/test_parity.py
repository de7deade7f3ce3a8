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


def build(world: int, **settings: Any) -> Layout:
    """Return a layout of two micro-batches per replica, or of four with a pipeline."""
    replica = BATCH // settings.get("dp", 1)
    parts = 4 if "pp" in settings else 2
    layout = Layout(micro_batch=replica // parts, global_batch=BATCH, **settings)
    assert layout.world == world
    return layout


def name_of(layout: Layout) -> str:
    """Return the settings that differ from the defaults."""
    plain = {**vars(Layout()), "micro_batch": 0, "global_batch": BATCH, "chunks": layout.chunks}
    differing = {k: v for k, v in vars(layout).items() if k in plain and plain[k] != v and k != "micro_batch"}
    return "-".join(f"{key}={value}" for key, value in differing.items())


INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "chunks": 2}
FP32 = [
    *(build(2, dp=2, zero=zero, recompute=zero in (1, 3)) for zero in range(4)),
    build(2, dp=2, gradient_as_bucket_view=False),
    build(2, tp=2),
    build(2, tp=2, sp=True, recompute=True),
    build(2, pp=2, schedule="gpipe"),
    build(2, pp=2, recompute=True),
    build(2, **INTERLEAVED),
    build(2, stage_layers=(0, 1, 1, 0), **INTERLEAVED),
    build(4, dp=2, tp=2, sp=True),
    build(4, dp=2, tp=2, zero=3),
    build(4, dp=2, pp=2),
    build(4, dp=2, pp=2, zero=2),
    build(4, tp=2, sp=True, **INTERLEAVED),
]


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


FP32_CASES = [
    pytest.param(layout, marks=pytest.mark.slow if layout in (FP32[11], FP32[13], FP32[15]) else ())
    for layout in FP32
]
"""FP32 layouts with marks. Two ranks test each axis; on four ranks, one FSDP and one pipeline layout are fast."""


@pytest.mark.parametrize("layout", FP32_CASES, ids=name_of)
def test_fp32_training_agrees_with_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    expected = alone(model=smallest(layout), **COSINE)
    assert expected.loss[-1] < 0.95 * expected.loss[0], "the loss must fall, or parity proves little"
    assert_same(run(request, layout, **COSINE), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", [FP32[3], FP32[6], FP32[9], replace(FP32[0], recompute=True)], ids=name_of)
def test_dropout_drops_the_elements_of_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Recomputation drops the same elements again."""
    expected = alone(model=smallest(layout), **DROPOUT)
    assert_same(run(request, layout, **DROPOUT), expected, 1e-5, 1e-5)


CASES_16_BIT = [
    pytest.param(
        layout,
        precision,
        id=f"{name_of(layout)}-{precision}",
        marks=pytest.mark.slow if precision == "bf16" and layout not in (FP32[0], FP32[3]) else (),
    )
    for layout in (FP32[0], FP32[1], FP32[3], FP32[6], FP32[8], FP32[13])
    for precision in ("bf16", "fp16")
]


@pytest.mark.parametrize(("layout", "precision"), CASES_16_BIT)
def test_16_bit_losses_are_close(request: pytest.FixtureRequest, layout: Layout, precision: str) -> None:
    """The tolerance is a few units in the last place, because torch rounds at other operations."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    training = FP16 if precision == "fp16" else {"steps": FP16["steps"]}
    expected = alone(precision, smallest(layout), **training)
    found = run(request, replace(layout, precision=precision), **training)
    assert_same(found, expected, 4 * unit, 4 * unit)
    assert all(trained.scale == expected.scale for trained in found)


@pytest.mark.parametrize("layout", [FP32[1], FP32[2], FP32[3], FP32[6], FP32[9], FP32[11]], ids=name_of)
def test_overflow_skips_the_step_on_all_ranks(request: pytest.FixtureRequest, layout: Layout) -> None:
    """GradScaler halves the scale, which is too large, at each step; the initial parameters of engine native remain."""
    training = {**FP16, "loss_scale": 2.0**60, "steps": 3, "untimed_steps": 1}
    engine = build_engine(tiny(Layout(), smallest(layout)), meshes.single_rank_mesh(), torch.device("cpu"))
    start = engine.full_parameters()
    ranks = run(request, replace(layout, precision="fp16"), **training)
    assert {name for trained in ranks for name in trained.parameters} == start.keys()
    for trained in ranks:
        assert trained.skipped == [0, 1, 2]
        assert trained.scale == [2.0**60, 2.0**59, 2.0**58]
        assert all(torch.equal(value, start[name]) for name, value in trained.parameters.items())
