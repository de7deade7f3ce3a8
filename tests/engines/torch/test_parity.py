"""Under every strategy of torch the model trains as one process of ours does: losses, norms, parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout, Model
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.parallel.test_parity import BATCH, alone
from tests.pool import RankPool
from tests.training import LEARNING, Trained, smallest, tiny, train

pytestmark = needs("torch")
COSINE: dict[str, Any] = {**LEARNING, "schedule": "cosine", "min_lr": 3e-4}
"""The weights move as far as in 20 steps of the ordinary rate."""
DROPPED: dict[str, Any] = {"steps": 6, "dropout": 0.1, "attention_dropout": 0.1, "clip": 1e3}
"""No norm reaches the limit: gradients are left as they are, not brought up to it."""
FP16: dict[str, Any] = {"steps": 6, "loss_scale": 2.0**12, "loss_scale_hysteresis": 1}


def of(world: int, **settings: Any) -> Layout:
    """A layout of two micro-batches a replica, or of four through a pipeline."""
    replica = BATCH // settings.get("dp", 1)
    parts = 4 if "pp" in settings else 2
    layout = Layout(micro_batch=replica // parts, global_batch=BATCH, **settings)
    assert layout.world == world
    return layout


def name_of(layout: Layout) -> str:
    """What differs from the defaults."""
    plain = {**vars(Layout()), "micro_batch": 0, "global_batch": BATCH, "chunks": layout.chunks}
    differing = {k: v for k, v in vars(layout).items() if k in plain and plain[k] != v and k != "micro_batch"}
    return "-".join(f"{key}={value}" for key, value in differing.items())


INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "chunks": 2}
FP32 = [
    *(of(2, dp=2, zero=zero, recompute=zero in (1, 3)) for zero in range(4)),
    of(2, dp=2, gradient_as_bucket_view=False),
    of(2, tp=2),
    of(2, tp=2, sp=True, recompute=True),
    of(2, pp=2, schedule="gpipe"),
    of(2, pp=2, recompute=True),
    of(2, **INTERLEAVED),
    of(2, stage_layers=(0, 1, 1, 0), **INTERLEAVED),
    of(4, dp=2, tp=2, sp=True),
    of(4, dp=2, tp=2, zero=3),
    of(4, dp=2, pp=2),
    of(4, dp=2, pp=2, zero=2),
    of(4, tp=2, sp=True, **INTERLEAVED),
]


def run(request: pytest.FixtureRequest, layout: Layout, **training: Any) -> list[Trained]:
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[layout.world])
    return pool.run(train, tiny(layout, smallest(layout), "torch", **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Relative distances: of losses, of norms within 10 times that, and of all of a rank's parameters as one vector."""
    assert {name for trained in found for name in trained.parameters} == expected.parameters.keys()
    for trained in found:
        for mine, theirs, tolerance in (
            (trained.loss, expected.loss, loss),
            (trained.norm, expected.norm, 10 * loss),
        ):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=tolerance, atol=0.0)
        names = list(trained.parameters)
        reference = torch.cat([expected.parameters[name].float().flatten() for name in names])
        mine = torch.cat([trained.parameters[name].float().flatten() for name in names])
        assert (mine - reference).norm() <= parameters * reference.norm()
        assert trained.skipped == expected.skipped


TOGETHER = [
    pytest.param(layout, marks=pytest.mark.slow if layout in (FP32[11], FP32[13], FP32[15]) else ())
    for layout in FP32
]
"""Of those on four ranks one under each of FSDP and pipelines is quick; two ranks have every axis by itself."""


@pytest.mark.parametrize("layout", TOGETHER, ids=name_of)
def test_fp32(request: pytest.FixtureRequest, layout: Layout) -> None:
    expected = alone(model=smallest(layout), **COSINE)
    assert expected.loss[-1] < 0.95 * expected.loss[0], "the run must learn, or parity shows little"
    assert_same(run(request, layout, **COSINE), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", [FP32[3], FP32[6], FP32[9], replace(FP32[0], recompute=True)], ids=name_of)
def test_dropout(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The same elements are dropped, again where a layer is computed again."""
    expected = alone(model=smallest(layout), **DROPPED)
    assert_same(run(request, layout, **DROPPED), expected, 1e-5, 1e-5)


HALF = [
    pytest.param(
        layout,
        precision,
        id=f"{name_of(layout)}-{precision}",
        marks=pytest.mark.slow if precision == "bf16" and layout not in (FP32[0], FP32[3]) else (),
    )
    for layout in (FP32[0], FP32[1], FP32[3], FP32[6], FP32[8], FP32[13])
    for precision in ("bf16", "fp16")
]


@pytest.mark.parametrize(("layout", "precision"), HALF)
def test_16_bits(request: pytest.FixtureRequest, layout: Layout, precision: str) -> None:
    """Equal to a few units in the last place: torch rounds at other places than we do."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    training = FP16 if precision == "fp16" else {"steps": FP16["steps"]}
    expected = alone(precision, smallest(layout), **training)
    found = run(request, replace(layout, precision=precision), **training)
    assert_same(found, expected, 4 * unit, 4 * unit)
    assert all(trained.scale == expected.scale for trained in found)


@pytest.mark.parametrize("layout", [FP32[1], FP32[2], FP32[6], FP32[8]], ids=name_of)
def test_overflow_skips_the_step_on_all_ranks(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The scale is far too large: GradScaler halves it each time, no parameter and no learning rate moves."""
    training = {**FP16, "loss_scale": 2.0**60, "steps": 3, "untimed_steps": 1}
    start = start_of(smallest(layout))
    for trained in run(request, replace(layout, precision="fp16"), **training):
        assert trained.skipped == [0, 1, 2]
        assert trained.scale == [2.0**60, 2.0**59, 2.0**58]
        assert all(torch.equal(value, start[name]) for name, value in trained.parameters.items())


def start_of(model: Model) -> dict[str, torch.Tensor]:
    """Our first weights."""
    return build_engine(
        tiny(Layout(), model), meshes.single_rank_mesh(), torch.device("cpu")
    ).full_parameters()


def starts(layout: Layout) -> dict[str, torch.Tensor]:
    experiment = tiny(layout, smallest(layout), "torch")
    mesh = meshes.distributed_mesh(layout, "cpu")
    return build_engine(experiment, mesh, torch.device("cpu")).full_parameters()


@pytest.mark.parametrize("layout", [FP32[3], FP32[6], FP32[9], FP32[11]], ids=name_of)
def test_the_start_is_ours_to_the_bit(request: pytest.FixtureRequest, layout: Layout) -> None:
    """However it is sharded, padded and split."""
    expected = start_of(smallest(layout))
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[layout.world])
    ranks = pool.run(starts, layout)
    assert {name for found in ranks for name in found} == expected.keys()
    for found in ranks:
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
