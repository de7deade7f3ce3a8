"""Tests of the clock of operators and links: repetitions, operands outside of the cache, and shares of a core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.accuracy.calibrate import benchmarks, target
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


@pytest.mark.parametrize(
    ("nbytes", "repeats", "calls"),
    [
        (1 << 40, 3, [2 + 1 + 1 + 3 * 4]),  # operands beyond the cache have one set
        (1, 1, [2 + 1 + 1 + 1, *[2] * (MOST_CALLS - 1)]),  # the maximum number of sets
    ],
)
def test_operator_seconds_are_those_of_one_warm_call(
    time: Clock, nbytes: int, repeats: int, calls: list[int]
) -> None:
    """Calls of 0.5 ms are made four times per repeat. Each set of arguments is used once before the timing."""
    made: list[int] = []

    def make() -> Callable[[], object]:
        """Return a call that takes ten times as long the first time."""
        number = len(made)
        made.append(0)

        def call() -> None:
            time.now += 0.5e-3 * (1 if made[number] else 10)
            made[number] += 1

        return call

    found = OperatorClock(CPU, WORLD, repeats).time(make, nbytes)
    assert (found.median, found.low, found.high) == pytest.approx((0.5e-3,) * 3)
    assert (found.repeats, made) == (repeats, calls)


def test_ranks_that_share_a_cache_each_flush_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine with two cores may report the 480 MB cache of its host, too much for each of sixteen ranks."""
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    single, one_of_eight = (OperatorClock(CPU, WORLD, repeats=1, neighbours=n) for n in (1, 8))
    assert (single.cache, one_of_eight.cache) == (2**20, 2**17)
    assert single._wipe.nbytes == 8 * one_of_eight._wipe.nbytes > 2**20
    monkeypatch.undo()
    assert clock_module.cache_bytes(CPU) > 0


def test_operands_and_results_of_a_call_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "cache_bytes", lambda device: 2**20)
    read, written = list[int](), list[int]()

    def make_call() -> Callable[[], torch.Tensor]:
        operand = torch.ones(2**15)  # a quarter of the cache, with the result

        def call() -> torch.Tensor:
            result = operand + 1
            read.append(operand.data_ptr())
            written.append(result.data_ptr())
            return result

        return call

    OperatorClock(CPU, WORLD, repeats=3).time(make_call, 2**18)
    for addresses in (read, written):
        assert all(len(set(addresses[i : i + 5])) == 5 for i in range(len(read) - 15, len(read) - 5))


def test_one_rank_per_core_measures_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rank_flops_per_s` also starts one rank per core; ranks that share a core would measure a lower rate."""
    monkeypatch.setattr(target.compute_rate, "core_flops_per_s", lambda: 5e9)
    found = [target.products_of_a_core(place, 2, WORLD) for place in range(4)]
    assert found == [5e9, 5e9, None, None]


class Busy:
    """Calls of 1 ms CPU time each, and a clock that advances by `wall_s` per call."""

    def __init__(self, wall_s: float):
        self.wall_s, self.calls = wall_s, 0

    def __call__(self, number: int = 0) -> None:
        self.calls += 1

    def perf_counter(self) -> float:
        return self.calls * self.wall_s

    def thread_time(self) -> float:
        return self.calls * 1e-3


@pytest.mark.parametrize("wall_s", [1e-3, 4e-3, 1.0])
def test_crowded_clock_measures_time_at_an_equal_core_share(
    monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    """The result does not depend on whether the rank had the full core, its share or less during the measurement.

    Ranks with a core each use wall time.
    """
    monkeypatch.setattr(clock_module, "usable_cores", lambda: 2)
    crowded, alone = (OperatorClock(CPU, WORLD, repeats=2, neighbours=count) for count in (8, 2))
    busy = Busy(wall_s)
    monkeypatch.setattr(clock_module, "time", busy)
    assert crowded.in_a_crowd(busy, alone=lambda: 0.0) == pytest.approx(4e-3)
    assert busy.calls == pytest.approx(max(1, clock_module.CROWDED_S / wall_s), abs=1)
    assert alone.time(lambda: busy, 8).median == pytest.approx(wall_s)


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
        assert [(at.median, at.repeats) for _, at in (small, large)] == [(expected, MANY * 2), (expected, 2)]
    assert len(beats) == 5 * (MANY * 2 + 2)
