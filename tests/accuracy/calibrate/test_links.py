"""Tests of repetitions: number of timed calls and divisor of their seconds, with a clock that only calls advance."""

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

CPU, WORLD = torch.device("cpu"), meshes.single_rank_mesh().world


SIZES = [1024, 2**21]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().rules(monkeypatch, clock_module, benchmarks)


def make_cold_call(time: Clock, calls: list[int], seconds: float) -> Callable[[], object]:
    """Return a call that takes ten times as long the first time."""
    number = len(calls)
    calls.append(0)

    def call() -> None:
        time.now += seconds * (1 if calls[number] else 10)
        calls[number] += 1

    return call


def test_operator_seconds_are_those_of_one_warm_call(time: Clock) -> None:
    """Calls of 0.5 ms are made four times per repeat. Each set of arguments is used once before the timing."""
    calls: list[int] = []
    found = OperatorClock(CPU, WORLD, repeats=3).time(
        lambda: make_cold_call(time, calls, 0.5e-3), nbytes=1 << 40
    )
    assert (found.median, found.low, found.high) == pytest.approx((0.5e-3,) * 3)
    assert found.repeats == 3
    assert calls == [2 + 1 + 1 + 3 * 4]  # operands beyond the cache have one set
    calls.clear()
    found = OperatorClock(CPU, WORLD, repeats=1).time(lambda: make_cold_call(time, calls, 0.5e-3), nbytes=1)
    assert found.median == pytest.approx(0.5e-3)
    assert calls == [2 + 1 + 1 + 1, *[2] * (MOST_CALLS - 1)], "the maximum number of sets"


@pytest.mark.parametrize(("payload", "calls"), [(2**16, 5), (2**16 + 1, 2), (2**20, 2), (2**20 + 1, 1)])
def test_small_messages_are_repeated_within_one_timing(time: Clock, payload: int, calls: int) -> None:
    runs: list[int] = []

    def run() -> None:
        runs.append(0)
        time.now += 0.25

    bench = LinkBench(OperatorClock(CPU, WORLD, repeats=1), 1024)
    assert bench._seconds(run, payload) == 0.25
    assert len(runs) == calls


def test_round_trip_counts_as_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation runs once before its timing; large payloads have a third of the repeats."""
    bench = LinkBench(OperatorClock(CPU, WORLD, repeats=2), 2**22)
    runs: Counter[Any] = Counter()

    def counted(name: str) -> Callable[..., Callable[[], None]]:
        return lambda *args: lambda: runs.update([(name, args[-2] if name == "collective" else args[0])])

    monkeypatch.setattr(bench, "_run", counted("collective"))
    monkeypatch.setattr(bench, "_messages", counted("message"))
    monkeypatch.setattr(bench, "_seconds", lambda run, payload: 8.0)
    beats: list[int] = []
    rows = bench.by_payload({GroupKind(1, 1, 1): WORLD}, {"memory": WORLD}, SIZES, lambda: beats.append(0))
    assert runs == {
        (kind, size): count for kind, count in (("collective", 4), ("message", 1)) for size in SIZES
    }
    assert [row["op"] for row in rows] == ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"]
    for row in rows:
        expected = 4.0 if row["op"] == "send" else 8.0
        small, large = row["points"]
        assert [small[0], large[0]] == SIZES
        assert (small[1].median, small[1].repeats) == (expected, MANY * 2)
        assert (large[1].median, large[1].repeats) == (expected, 2)
    assert len(beats) == 5 * (MANY * 2 + 2)
