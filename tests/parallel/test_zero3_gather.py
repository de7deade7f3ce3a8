"""Stage 3 as released in March 2021: parameter by parameter, each waited for, in lists of the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.config.errors import ConfigError
from repro.engines.native import NativeEngine
from repro.parallel import mesh as meshes
from repro.parallel.zero import flat_parameters
from repro.parallel.zero.partition import plan_bucket
from tests.parallel.test_communication import events, traffic
from tests.parallel.test_parity import BATCH, alone, assert_same
from tests.pool import RankPool
from tests.training import FEW, TINY, Trained, smallest, tiny, train

LIMIT = 1000
"""In place of 100,000 elements, so that a tiny model has parameters of both kinds: matrices, and the others."""


@contextmanager
def limit(elements: int) -> Iterator[None]:
    before, flat_parameters.STAYS_BELOW = flat_parameters.STAYS_BELOW, elements
    try:
        yield
    finally:
        flat_parameters.STAYS_BELOW = before


def limited(work: Callable[[Experiment], Any], experiment: Experiment) -> Any:
    """`work` on this rank with parameters of few elements gathered by themselves."""
    with limit(LIMIT):
        return work(experiment)


def sizes(experiment: Experiment) -> list[int]:
    """Elements of every parameter, on one rank without stage 3."""
    layout = Layout(micro_batch=BATCH)
    engine = NativeEngine(replace(experiment, layout=layout), meshes.single(), torch.device("cpu"))
    return [parameter.numel() for parameter in engine.parts[0].model.parameters()]


@pytest.mark.parametrize(
    ("pool", "recompute"),
    [("two", False), ("two", True), pytest.param("four", False, marks=pytest.mark.slow), ("four", True)],
)
def test_trains_the_same_model(request: pytest.FixtureRequest, pool: str, recompute: bool) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    samples = BATCH // ranks.world // 2
    layout = Layout(
        dp=ranks.world,
        zero=3,
        zero3_gather="parameter",
        micro_batch=samples,
        global_batch=BATCH,
        recompute=recompute,
    )
    model = smallest(layout)
    found: list[Trained] = ranks.run(partial(limited, train), tiny(layout, model, **FEW))
    assert_same(found, alone(model=model, **FEW), 1e-5, 1e-5)


@pytest.mark.parametrize("pool", ["two", "four"])
def test_volume(request: pytest.FixtureRequest, pool: str) -> None:
    """Large parameters are gathered forward and backward, each by itself; small ones stay, and are once a step."""
    ranks: RankPool = request.getfixturevalue(pool)
    n = ranks.world
    experiment = tiny(Layout(dp=n, zero=3, zero3_gather="parameter", precision="bf16"))
    large = [size for size in sizes(experiment) if size >= LIMIT]
    assert len(large) == 4 * TINY.layers + 1, "four matrices a layer, and the tokens' embedding"
    padded = sum(plan_bucket([(0, size, None)], n).padded for size in large)
    for seen in ranks.run(partial(limited, traffic), experiment):
        gathers, reductions = (
            seen["rows"]["all_gather", "dp", "parameters"],
            seen["rows"]["reduce_scatter", "dp", "gradients"],
        )
        units = TINY.layers + 1
        assert gathers["calls"] == 2 * len(large) + units
        assert gathers["payload_bytes"] == (padded + seen["psi"]) * 2
        assert reductions["calls"] == len(large) + units
        assert reductions["payload_bytes"] == seen["psi"] * 2


def test_nothing_is_gathered_ahead(two: RankPool) -> None:
    """While a block computes forward nobody asks for parameters; its own were waited for before."""
    for seen in two.run(partial(limited, events), tiny(Layout(dp=2, zero=3, zero3_gather="parameter"))):
        inside, gathers = False, 0
        for op, what in seen:
            if op in ("forward starts", "forward ends"):
                inside = op == "forward starts"
            elif what == "parameters":
                assert not inside
                gathers += 1
        assert gathers > 2 * TINY.layers


def copies(experiment: Experiment) -> int:
    """How many copies one gather of the first block makes."""
    mesh = meshes.distributed(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    gatherer = engine.parts[0].sharded.gatherer
    assert gatherer is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        gatherer.need(1)
    copied = sum(event.count for event in profiled.key_averages() if event.key == "aten::copy_")
    gatherer.free_all()
    return copied


def test_what_comes_is_copied_rank_by_rank(four: RankPool) -> None:
    """A list of n parts is n copies for each of the four matrices and what is gathered with the small ones."""
    layout = Layout(dp=4, zero=3, zero3_gather="parameter")
    by_block = four.run(partial(limited, copies), tiny(replace(layout, zero3_gather="block")))
    for parts, block in zip(four.run(partial(limited, copies), tiny(layout)), by_block, strict=True):
        own = 1  # gloo puts a rank's own part in its place by a copy, once for every message
        assert parts == (4 + 1) * (4 + own)
        assert block == own


def test_only_stage_3_gathers_where_parameters_are_used() -> None:
    with pytest.raises(ConfigError, match="zero3_gather"):
        Layout(dp=2, zero=2, zero3_gather="parameter")
