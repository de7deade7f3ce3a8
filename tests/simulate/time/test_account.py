"""Tests of the account of a wait: exposed communication of its collective, or bubble."""

from __future__ import annotations

import pytest

from repro.simulate.time.breakdown import STAGE_SEND, StageTime
from repro.simulate.time.program import Issue

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
