"""The pace of a rank that shares a core: no faster when others wait, and no credit for waiting itself."""

from __future__ import annotations

import time

import pytest

from repro.launch.rank.pace import CATCH_UP_S, TICK_S, Pace

SHARE = 0.25


def compute(seconds: float) -> float:
    """Seconds of processor time that the thread got in about so many."""
    began, end = time.thread_time(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))
    return time.thread_time() - began


@pytest.mark.parametrize("by", ["messages", "timer"])
def test_a_thread_computes_for_its_share_of_the_time_whether_it_waited_before_or_not(by: str) -> None:
    pace = Pace(SHARE)
    if by == "timer":
        pace.start()
    try:
        spent, computed = 0.0, 0.0
        for _ in range(4):
            time.sleep(0.2)  # as if for a message
            began = time.perf_counter()
            computed += compute(0.05)
            pace.settle()
            spent += time.perf_counter() - began
    finally:
        pace.stop()
    # What it was kept from its core for it may make up for, and the kernel's timer comes late.
    assert computed < SHARE * spent + 4 * SHARE * CATCH_UP_S + TICK_S
    assert computed > 0.02


def test_a_tick_of_the_timer_while_it_sleeps_is_not_paid_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(SHARE)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        pace.settle()

    monkeypatch.setattr("repro.launch.rank.pace.time.sleep", sleep)
    compute(0.02)
    pace.settle()
    assert len(sleeps) == 1


def test_what_a_thread_has_not_computed_it_does_not_pay_for() -> None:
    """Looking at the clocks is no computing either: at a thousandth of a core it would be seconds."""
    pace = Pace(1e-3)
    began = time.perf_counter()
    for _ in range(100):
        pace.settle()
    assert time.perf_counter() - began < 1.0
