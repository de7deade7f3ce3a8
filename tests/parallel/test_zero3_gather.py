"""Tests of stage 3 as released in March 2021, which gathers each parameter separately and waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from repro.parallel.zero import flat_parameters
from repro.parallel.zero.partition import plan_bucket
from repro.simulate.trace.events import HOST_VIEWS, HOST_WAIT, Message, Operator
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_communication import events, traffic
from tests.parallel.test_parity import BATCH, alone, assert_same, name_of
from tests.pool import RankPool, pool_of
from tests.training import FEW, TINY, smallest, tiny, train

THRESHOLD = 1000
"""Persistence threshold in place of 100,000 elements, which the large matrices of a tiny model exceed."""
REUSE_DISTANCE = 8 * TINY.hidden**2
"""Maximum reuse distance in place of 1e9 elements. Three of a block's four matrices have at least this distance."""


def with_limits(work: Callable[[Experiment], Any], experiment: Experiment) -> Any:
    """Return the result of `work` with the persistence threshold and the maximum reuse distance of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_parameters, "PERSISTENCE_THRESHOLD_ELEMENTS", THRESHOLD)
        patch.setattr(flat_parameters, "MAX_REUSE_DISTANCE_ELEMENTS", REUSE_DISTANCE)
        return work(experiment)


LAYOUT = Layout(dp=2, zero=3, zero3_gather="parameter")


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, micro_batch=2, global_batch=BATCH),
        replace(LAYOUT, dp=4, global_batch=BATCH, recompute=True),
    ],
    ids=name_of,
)
def test_separate_gathers_preserve_parity(request: pytest.FixtureRequest, layout: Layout) -> None:
    model = smallest(layout)
    found = pool_of(request, layout).run(partial(with_limits, train), tiny(layout, model, **FEW))
    assert_same(found, alone(model=model, **FEW), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "layout", [replace(LAYOUT, recompute=True), replace(LAYOUT, dp=4, global_batch=4)], ids=name_of
)
def test_large_parameters_are_gathered_separately(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Large parameters are gathered in forward and backward, and the small ones of a unit once per step.

    With recomputation, three matrices of each block are gathered again in its backward pass.
    """
    experiment = tiny(replace(layout, precision="bf16"))
    large = [p.numel() for p in alone(**FEW).parameters.values() if p.numel() >= THRESHOLD]
    assert len(large) == 4 * TINY.layers + 1, "four matrices per layer, and the token embedding"
    padded = sum(plan_bucket([(0, size, None)], layout.dp).padded for size in large)
    repeated = [n * TINY.hidden**2 for n in (3, 1, 4)] * TINY.layers if layout.recompute else []
    units = TINY.layers + 1
    for seen in pool_of(request, layout).run(partial(with_limits, traffic), experiment):
        gathers = seen["rows"]["all_gather", "dp", "parameters"]
        assert gathers["calls"] == 2 * len(large) + units + len(repeated)
        assert gathers["payload_bytes"] == (padded + seen["psi"] + sum(repeated)) * 2
        reductions = seen["rows"]["reduce_scatter", "dp", "gradients"]
        assert reductions["calls"] == len(large) + units
        assert reductions["payload_bytes"] == seen["psi"] * 2


@pytest.mark.parametrize(("hidden", "exceeding"), [(12288, 3), (8192, 2), (1600, 0)])
def test_reuse_distance_decides_which_matrices_are_freed(hidden: int, exceeding: int) -> None:
    """Matrices of a layer of GPT with 175B and with 1.5B parameters, and of a model between both."""
    found = flat_parameters.exceed_reuse_distance([n * hidden**2 for n in (3, 1, 4, 4)])
    assert found == [True] * exceeding + [False] * (4 - exceeding)


def test_no_gather_starts_during_the_forward_of_a_block(two: RankPool) -> None:
    """The gathers of a block end before its forward pass."""
    for seen in two.run(partial(with_limits, events), tiny(LAYOUT)):
        is_forward, gathers = False, 0
        for op, purpose in seen:
            if op in ("forward starts", "forward ends"):
                is_forward = op == "forward starts"
            elif purpose == "parameters":
                assert not is_forward
                gathers += 1
        assert gathers > 2 * TINY.layers


def count_copies(experiment: Experiment) -> int:
    """Return the number of copies in one gather of the first block."""
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    engine = NativeEngine(experiment, mesh, torch.device("cpu"))
    gatherer = engine.parts[0].sharded.gatherer
    assert gatherer is not None
    copies = count_calls(lambda: gatherer.gather(1))["aten::copy_"]
    gatherer.free_all()
    return copies


def count_calls(work: Callable[[], object]) -> Counter[str]:
    """Return the number of calls of each operator in `work`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        work()
    return Counter({event.key: event.count for event in profiled.key_averages()})


def test_gathered_parameters_are_copied_from_each_ranks_part(four: RankPool) -> None:
    """The lists of four matrices and of the small parameters together have 4 parts each."""
    by_parameter, by_block = (
        four.run(partial(with_limits, count_copies), tiny(Layout(dp=4, zero=3, zero3_gather=unit)))
        for unit in ("parameter", "block")
    )
    for parts, block in zip(by_parameter, by_block, strict=True):
        gloo_copies = 1  # gloo copies the rank's own part, once per collective
        assert parts == (4 + 1) * (4 + gloo_copies)
        assert block == gloo_copies


@pytest.mark.parametrize("flattened", [False, True])
def test_rank_parts_are_views_of_the_buffer(flattened: bool) -> None:
    calls = count_calls(lambda: flat_parameters.RankParts(torch.zeros(12), 3, flattened=flattened))
    assert (calls["aten::narrow"], calls["aten::view"]) == (3, 3 * flattened)


def test_trace_counts_views_and_host_waits() -> None:
    """A gather makes n views and a reduce-scatter 2n. The host waits before and after each gather."""
    experiment = tiny(replace(LAYOUT, dp=8, global_batch=8, precision="bf16", recompute=True))
    step = with_limits(lambda experiment: trace(experiment, roles(experiment)[0]).step, experiment)
    sent = Counter(event.op for event in step if isinstance(event, Message) and event.group == "dp")
    views, waits = (
        sum(event.calls for event in step if isinstance(event, Operator) and event.name == name)
        for name in (HOST_VIEWS, HOST_WAIT)
    )
    assert sent["all_gather"] > sent["reduce_scatter"] > 4 * TINY.layers
    assert views == 8 * (sent["all_gather"] + 2 * sent["reduce_scatter"])
    assert waits == 2 * sent["all_gather"]
