"""No schedule's messages wait for each other for ever: on hosts that meet, on devices, and where code is loaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from repro.config import Layout
from tests.parallel.streams import Program, programs, stuck

Case = tuple[str, int, int, int]


def cases(most_stages: int, most_micro_batches: int) -> list[Case]:
    """(schedule, p, m, v)."""
    return [
        (schedule, p, m, v)
        for schedule, chunks in (("gpipe", (1,)), ("1f1b", (1,)), ("interleaved", (2, 3)))
        for p in range(2, most_stages + 1)
        for m in range(1, most_micro_batches + 1)
        for v in chunks
        if schedule != "interleaved" or m % p == 0
    ]


SMALL = cases(4, 5)


@cache
def issued(case: Case, overlap: bool = True) -> list[Program]:
    schedule, p, m, v = case
    return programs(Layout(pp=p, global_batch=m, schedule=schedule, chunks=v, overlap=overlap))


def that_hang(found: list[Case], overlap: bool = True, **how: Any) -> set[Case]:
    return {case for case in found if stuck(issued(case, overlap), **how)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "found", [SMALL, pytest.param(cases(8, 16), marks=pytest.mark.slow)], ids=["p4-m5", "p8-m16"]
)
def test_no_schedule_hangs_on_connected_channels(found: list[Case], overlap: bool) -> None:
    """Whatever its code's first use waits for; and but for interleaved stages, whatever any computation waits for."""
    assert not that_hang(found, overlap)
    assert not that_hang(found, overlap, loads="first")
    assert not that_hang([case for case in found if case[0] != "interleaved"], overlap, loads="always")


def test_lazily_connected_channels_hang_with_one_micro_batch() -> None:
    """The hosts of both ends meet at the first message, and each stage would post a receive before its send."""
    one = {(schedule, p, m, v) for schedule, p, m, v in SMALL if schedule != "interleaved" and m == 1}
    assert that_hang(SMALL, connected=False) == one


def test_activations_and_gradients_cannot_share_a_communicator() -> None:
    assert that_hang(SMALL, communicator=lambda channel: frozenset(channel[:2])) != set()
