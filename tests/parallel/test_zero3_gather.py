"""Stage 3 as released in March 2021: parameter by parameter, each waited for, in lists of the ranks' parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.config.errors import ConfigError
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from repro.parallel.zero import flat_parameters
from repro.parallel.zero.partition import plan_bucket
from repro.simulate.trace.events import HOST_VIEWS, HOST_WAIT, Message, Operator
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_communication import events, traffic
from tests.parallel.test_parity import BATCH, alone, assert_same
from tests.pool import RankPool
from tests.training import FEW, TINY, Trained, smallest, tiny, train

LIMIT = 1000
"""In place of 100,000 elements, so that a tiny model has parameters of both kinds: matrices, and the others."""


NEAR = 8 * TINY.hidden**2
"""In place of 1e9 elements: before the third of a block's four matrices is used again the fourth is, twice."""


@contextmanager
def limits(stays: int, near: int) -> Iterator[None]:
    before = flat_parameters.PERSISTENCE_THRESHOLD_ELEMENTS, flat_parameters.MAX_REUSE_DISTANCE_ELEMENTS
    flat_parameters.PERSISTENCE_THRESHOLD_ELEMENTS, flat_parameters.MAX_REUSE_DISTANCE_ELEMENTS = stays, near
    try:
        yield
    finally:
        flat_parameters.PERSISTENCE_THRESHOLD_ELEMENTS, flat_parameters.MAX_REUSE_DISTANCE_ELEMENTS = before


def limited(work: Callable[[Experiment], Any], experiment: Experiment) -> Any:
    """`work` on this rank with parameters of few elements gathered by themselves, and freed for few others."""
    with limits(LIMIT, NEAR):
        return work(experiment)


def sizes(experiment: Experiment) -> list[int]:
    """Elements of every parameter, on one rank without stage 3."""
    layout = Layout(micro_batch=BATCH)
    engine = NativeEngine(replace(experiment, layout=layout), meshes.single_rank_mesh(), torch.device("cpu"))
    return [parameter.numel() for parameter in engine.parts[0].model.parameters()]


@pytest.mark.parametrize(("pool", "recompute"), [("two", False), ("four", True)])
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


@pytest.mark.parametrize(("pool", "recompute"), [("two", False), ("two", True), ("four", False)])
def test_volume(request: pytest.FixtureRequest, pool: str, recompute: bool) -> None:
    """Large parameters are gathered forward and backward, each by itself; small ones stay, and are once a step.

    Three of a block's matrices come once more where its backward pass is a second forward pass away from it.
    """
    ranks: RankPool = request.getfixturevalue(pool)
    n = ranks.world
    experiment = tiny(Layout(dp=n, zero=3, zero3_gather="parameter", precision="bf16", recompute=recompute))
    large = [size for size in sizes(experiment) if size >= LIMIT]
    assert len(large) == 4 * TINY.layers + 1, "four matrices a layer, and the tokens' embedding"
    padded = sum(plan_bucket([(0, size, None)], n).padded for size in large)
    again = [3 * TINY.hidden**2, TINY.hidden**2, 4 * TINY.hidden**2] * TINY.layers if recompute else []
    for seen in ranks.run(partial(limited, traffic), experiment):
        gathers, reductions = (
            seen["rows"]["all_gather", "dp", "parameters"],
            seen["rows"]["reduce_scatter", "dp", "gradients"],
        )
        units = TINY.layers + 1
        assert gathers["calls"] == 2 * len(large) + units + len(again)
        assert gathers["payload_bytes"] == (padded + seen["psi"] + sum(again)) * 2
        assert reductions["calls"] == len(large) + units
        assert reductions["payload_bytes"] == seen["psi"] * 2


def test_what_is_used_again_late() -> None:
    """Of a GPT's layer: all but the last matrix of 175B's, none of 1.5B's, and what lies between the two."""
    layer = [3, 1, 4, 4]
    assert flat_parameters.exceed_reuse_distance([part * 12288**2 for part in layer]) == [
        True,
        True,
        True,
        False,
    ]
    assert flat_parameters.exceed_reuse_distance([part * 1600**2 for part in layer]) == [False] * 4
    assert flat_parameters.exceed_reuse_distance([part * 8192**2 for part in layer]) == [
        True,
        True,
        False,
        False,
    ]


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
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    gatherer = engine.parts[0].sharded.gatherer
    assert gatherer is not None
    copied = calls(lambda: gatherer.gather(1))["aten::copy_"]
    gatherer.free_all()
    return copied


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often each operator was called in `work`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        work()
    return Counter({event.key: event.count for event in profiled.key_averages()})


def test_what_comes_is_copied_rank_by_rank(four: RankPool) -> None:
    """A list of n parts is n copies for each of the four matrices and what is gathered with the small ones."""
    layout = Layout(dp=4, zero=3, zero3_gather="parameter")
    by_block = four.run(partial(limited, copies), tiny(replace(layout, zero3_gather="block")))
    for parts, block in zip(four.run(partial(limited, copies), tiny(layout)), by_block, strict=True):
        own = 1  # gloo puts a rank's own part in its place by a copy, once for every message
        assert parts == (4 + 1) * (4 + own)
        assert block == own


@pytest.mark.parametrize("flattened", [False, True])
def test_parts_are_views_of_their_own(flattened: bool) -> None:
    there, values, copied = torch.zeros(12), torch.arange(12.0), torch.zeros(12)
    made = calls(lambda: flat_parameters.RankParts(there, 3, flattened=flattened))
    assert (made["aten::narrow"], made["aten::view"]) == (3, 3 * flattened)
    parts = flat_parameters.RankParts(there, 3, flattened=flattened)
    parts.copy_from(values)
    assert torch.equal(there, values)
    parts.copy_to(copied)
    assert torch.equal(copied, values)


def test_a_trace_counts_views_and_waits() -> None:
    """n views for a list of a gather, of a reduce-scatter 2n; the host waits before each gather and after it."""
    layout = Layout(dp=8, zero=3, zero3_gather="parameter", precision="bf16", recompute=True)
    experiment = tiny(layout)
    with limits(LIMIT, NEAR):
        step = trace(experiment, roles(experiment)[0]).step
    sent = Counter(event.op for event in step if isinstance(event, Message) and event.group == "dp")
    views, waits = (
        sum(event.calls for event in step if isinstance(event, Operator) and event.name == name)
        for name in (HOST_VIEWS, HOST_WAIT)
    )
    assert sent["all_gather"] > sent["reduce_scatter"] > 4 * TINY.layers
    assert views == 8 * (sent["all_gather"] + 2 * sent["reduce_scatter"])
    assert waits == 2 * sent["all_gather"]


def test_only_stage_3_gathers_where_parameters_are_used() -> None:
    with pytest.raises(ConfigError, match="zero3_gather"):
        Layout(dp=2, zero=2, zero3_gather="parameter")
