"""Tests of parts of a stage's schedule by hand: the account of a wait, runs of items, and shared CPU cores."""

from __future__ import annotations

from typing import Any

import pytest

from repro.simulate.time.breakdown import STAGE_SEND, StageTime
from repro.simulate.time.cross_stage import CoreWork, SharedCores
from repro.simulate.time.program import Await, Issue, OperatorBlock, Send, split_into_runs

NORM_REDUCTION = Issue(("tail",), "world", "norm", 2.0)


@pytest.mark.parametrize(
    ("now", "end", "across", "exposed", "bubble"),
    [
        (1.0, 6.0, True, 2.0, 3.0),  # the other stage arrived three seconds later
        (1.0, 2.5, True, 1.5, 0.0),
        (1.0, 6.0, False, 5.0, 0.0),  # a group inside the stage: no bubble
        (6.0, 1.0, True, 0.0, 0.0),
    ],
)
def test_a_wait_longer_than_its_collective_is_bubble(
    now: float, end: float, across: bool, exposed: float, bubble: float
) -> None:
    time = StageTime()
    for times in (1, 2):
        time.waited_for(NORM_REDUCTION, now, end, across=across)
        assert (time.exposed["norm"], time.bubble) == (times * exposed, times * bubble)


def test_a_wait_before_a_message_starts_is_bubble() -> None:
    time = StageTime()
    time.waited_for_message(1.0, 4.0, 4.5)
    assert (time.bubble, time.exposed[STAGE_SEND]) == (3.0, 0.5)
    time.waited_for_message(1.0, 0.5, 2.0)
    assert (time.bubble, time.exposed[STAGE_SEND]) == (3.0, 1.5)


BLOCK, SEND = OperatorBlock(1.0, (("matmul", 1.0),)), Send(1, 0, 8)
TP_ISSUE, TP_AWAIT = Issue(("x",), "tp", "block", 1.0), Await(("x",))
DP_ISSUE, DP_AWAIT = Issue(("y",), "dp", "gradients", 1.0), Await(("y",))
WORLD_ISSUE = Issue(("y",), "world", "norm", 1.0)


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        # A completed collective of tensor or data parallelism is inside a run.
        ([BLOCK, TP_ISSUE, BLOCK, TP_AWAIT, BLOCK], [(0, 5)]),
        ([BLOCK, DP_ISSUE, BLOCK, DP_AWAIT], [(0, 4)]),
        ([BLOCK, TP_ISSUE, BLOCK, TP_AWAIT, BLOCK, SEND, BLOCK], [(0, 5), (6, 7)]),
        # A collective of the world, or one without an await, ends a run.
        ([BLOCK, WORLD_ISSUE, BLOCK, DP_AWAIT], [(0, 1), (2, 3), (4, 4)]),
        ([BLOCK, TP_ISSUE, BLOCK], [(0, 1), (2, 3)]),
        # A run ends before a collective in flight.
        ([BLOCK, TP_ISSUE, SEND, TP_AWAIT], [(0, 1), (3, 3)]),
    ],
)
def test_a_run_contains_only_items_whose_seconds_are_known(
    items: list[Any], runs: list[tuple[int, int]]
) -> None:
    """`runs`: first and last position of each run. Runs alternate with the items between them."""
    expected = []
    for (first, last), (following, _) in zip(runs, [*runs[1:], (len(items), 0)], strict=True):
        expected += [(True, items[first:last]), (False, items[last:following])]
    assert list(split_into_runs(items)) == expected


@pytest.mark.parametrize(
    ("oversubscription", "stages", "works", "ends"),
    [
        # The first work runs alone for 1 s at twice the rate, then 2 s with the second, which then has 2 s left.
        (2.0, 2, [(0.0, 4.0), (1.0, 4.0)], [3.0, 4.0]),
        # The first work does 1.5 of 4 s alone and ends at 3.5 s, when the second work has done 2.5 s.
        (1.5, 2, [(0.0, 4.0), (1.0, 4.0)], [3.5, 4.5]),
        (1.0, 2, [(0.0, 4.0), (1.0, 4.0)], [4.0, 5.0]),
        # Four stages share two cores: two that compute have a core each, three have two thirds of a core each.
        (2.0, 4, [(0.0, 2.0), (0.0, 2.0)], [1.0, 1.0]),
        (2.0, 4, [(0.0, 2.0), (0.0, 2.0), (0.0, 4.0)], [1.5, 1.5, 2.5]),
        # Time advances while no stage computes.
        (1.0, 2, [(5.0, 1.0), (7.0, 1.0)], [6.0, 8.0]),
    ],
)
def test_computing_stages_share_the_free_cores(
    oversubscription: float, stages: int, works: list[tuple[float, float]], ends: list[float]
) -> None:
    """Each stage has one work with a start and a length, and uses at most one core."""
    cores, added = SharedCores(oversubscription, stages), [CoreWork(*work) for work in works]
    for work in added:
        cores.add(work)
    ended = []
    while cores.works:
        ended += cores.advance()
    assert sorted(map(id, ended)) == sorted(map(id, added))
    assert [work.end for work in added] == pytest.approx(ends)
    assert cores.now == pytest.approx(max(ends))


def test_works_with_equal_ends_are_returned_together() -> None:
    cores = SharedCores(1.0, stages=2)
    first, second, later = (CoreWork(0.0, seconds) for seconds in (2.0, 2.0, 3.0))
    for work in (first, second, later):
        cores.add(work)
    assert cores.advance() == [first, second]
    assert (first.end, later.end, later.left, cores.works) == (3.0, None, 1.0, [later])
