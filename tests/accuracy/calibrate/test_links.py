"""How often what is timed is called, and by what its seconds are divided: with a clock that only calls move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.accuracy.calibrate import benchmarks
from repro.accuracy.calibrate import clock as clock_module
from repro.accuracy.calibrate.benchmarks import MANY, LinkBench
from repro.accuracy.calibrate.clock import MOST_CALLS, OperatorClock
from repro.accuracy.calibrate.plan import GroupKind
from repro.parallel import mesh as meshes
from tests.clock import Clock

WORLD = meshes.single_rank_mesh().world


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().rules(monkeypatch, clock_module, benchmarks)


def operator_clock(repeats: int) -> OperatorClock:
    return OperatorClock(torch.device("cpu"), WORLD, repeats)


def cold(time: Clock, calls: list[int], seconds: float) -> Callable[[], object]:
    """Something that takes ten times as long when it is called first."""
    number = len(calls)
    calls.append(0)

    def call() -> None:
        time.now += seconds * (1 if calls[number] else 10)
        calls[number] += 1

    return call


def test_an_operator_s_seconds_are_those_of_one_warm_call(time: Clock) -> None:
    """Half a millisecond: four calls a repeat; each set of arguments is used once before it counts."""
    calls: list[int] = []
    found = operator_clock(repeats=3).time(lambda: cold(time, calls, 0.5e-3), nbytes=1 << 40)
    assert (found.median, found.low, found.high) == pytest.approx((0.5e-3,) * 3)
    assert found.repeats == 3
    assert calls == [2 + 1 + 1 + 3 * 4]  # what does not fit the cache has one set
    calls.clear()
    found = operator_clock(repeats=1).time(lambda: cold(time, calls, 0.5e-3), nbytes=1)
    assert found.median == pytest.approx(0.5e-3)
    assert calls == [2 + 1 + 1 + 1, *[2] * (MOST_CALLS - 1)], "as many sets as may be, which the cache holds"


@pytest.mark.parametrize(("payload", "calls"), [(2**16, 5), (2**16 + 1, 2), (2**20, 2), (2**20 + 1, 1)])
def test_small_messages_are_sent_several_times_in_a_row(time: Clock, payload: int, calls: int) -> None:
    made: list[int] = []

    def run() -> None:
        made.append(0)
        time.now += 0.25

    bench = LinkBench(operator_clock(1), 1024)
    assert bench._seconds(run, payload) == 0.25
    assert len(made) == calls


def test_a_message_there_and_back_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is done once before it is timed; large payloads are timed a third as often."""
    bench = LinkBench(operator_clock(2), 2**22)
    runs: Counter[Any] = Counter()

    def counted(name: str) -> Callable[..., Callable[[], None]]:
        return lambda *what: lambda: runs.update([(name, what[-2] if name == "collective" else what[0])])

    monkeypatch.setattr(bench, "_run", counted("collective"))
    monkeypatch.setattr(bench, "_messages", counted("message"))
    monkeypatch.setattr(bench, "_seconds", lambda run, payload: 8.0)
    beats: list[int] = []
    rows = bench.by_payload(
        {GroupKind(1, 1, 1): WORLD}, {"memory": WORLD}, [1024, 2**21], lambda: beats.append(0)
    )
    assert runs == {
        ("collective", 1024): 4,
        ("collective", 2**21): 4,
        ("message", 1024): 1,
        ("message", 2**21): 1,
    }
    assert [row["op"] for row in rows] == ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"]
    for row in rows:
        expected = 4.0 if row["op"] == "send" else 8.0
        small, large = row["points"]
        assert (small[0], large[0]) == (1024, 2**21)
        assert (small[1].median, small[1].repeats) == (expected, MANY * 2)
        assert (large[1].median, large[1].repeats) == (expected, 2)
    assert len(beats) == 5 * (MANY * 2 + 2)
