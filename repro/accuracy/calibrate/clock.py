"""A clock for single operators: warm-up, caches emptied between repeats, all ranks at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from repro.measure.statistics import quantile
from repro.parallel.comm import Group
from repro.util.processes import usable_cores

ASSUMED_CACHE = 64 * 2**20
"""Bytes of the last-level cache where the machine does not tell."""
REPEAT_S = 2e-3
"""A repeat calls often enough to last this long: far above the clock's own microsecond."""
CROWDED_S = 40e-3
"""The same where ranks outnumber the cores: long enough that most of them are busy for most of it."""
MOST_CALLS = 64
SLEEP_HZ = 4e9
"""Twice the clock of any GPU: it is kept busy while the host enqueues the calls, so that it never waits for it."""


class OperatorTiming(NamedTuple):
    """Seconds of one call: median and quartiles over repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def timing(seconds: Sequence[float]) -> OperatorTiming:
    """Median and quartiles of a sample."""
    return OperatorTiming(
        quantile(seconds, 0.5), quantile(seconds, 0.25), quantile(seconds, 0.75), len(seconds)
    )


class OperatorClock:
    """Times calls on one device while the group's other ranks do the same."""

    def __init__(
        self, device: torch.device, group: Group, repeats: int, neighbours: int = 1, cores: int | None = None
    ):
        """`neighbours`: ranks of this node, this one too; on so many `cores`, or on all that they may use."""
        self.device, self.group, self.repeats = device, group, repeats
        self.ranks_per_core = (
            max(1.0, neighbours / (cores or usable_cores())) if device.type == "cpu" else 1.0
        )
        self.cache = max(1, cache_bytes(device) // (neighbours if device.type == "cpu" else 1))
        """Of the last-level cache, in bytes: processes of one node share it, and flush their parts at once."""
        self._host_s = 0.0
        """What the host needs to begin one call."""
        self._wipe = torch.empty(self.cache + self.cache // 4, dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Write more than the last-level cache holds, all ranks of a node together."""
        self._wipe.zero_()

    def synchronize(self) -> None:
        """Return when the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, make: Callable[[], Callable[[], object]], nbytes: int) -> OperatorTiming:
        """Seconds of one call of what `make` returns, which reads and writes `nbytes`.

        Calls go round among several sets of arguments and of results, more than the cache holds: a step does not find
        its operands in the cache either, nor the memory that it writes to, unless all of it fits.
        """
        first = make()
        first()
        self.synchronize()
        began = time.perf_counter()
        first()
        self._host_s = time.perf_counter() - began
        once = self._run([first], 1)
        sets = min(MOST_CALLS, 1 + self.cache // max(1, nbytes))
        calls = max(sets, min(MOST_CALLS, math.ceil(REPEAT_S / max(once, 1e-7))))
        kept: deque[object] = deque(maxlen=sets)

        def keeping(function: Callable[[], object]) -> Callable[[], object]:
            return lambda: kept.append(function())

        functions = [keeping(function) for function in (first, *(make() for _ in range(sets - 1)))]
        self._run(functions, sets)
        found = []
        for _ in range(self.repeats):
            self.flush()
            self.synchronize()
            self.group.barrier()
            found.append(
                self.in_a_crowd(lambda i: functions[i % sets](), lambda: self._run(functions, calls))
            )
        return timing(found)

    def in_a_crowd(self, call: Callable[[int], object], alone: Callable[[], float]) -> float:
        """Seconds of one of as many calls as `CROWDED_S` takes, where each rank has an equal part of a core; `alone()`
        where each has one of its own.  `call` gets the number of the call.

        Counted in processor time: ranks come out of a barrier up to many turns of the kernel's scheduler apart, and by
        the wall the first would be timed while they have the core to themselves, and so would the last.
        """
        if self.ranks_per_core == 1:
            return alone()
        end, began, count = time.perf_counter() + CROWDED_S, time.thread_time(), 0
        while not count or time.perf_counter() < end:  # one call, even if others had the core all the while
            call(count)
            count += 1
        return (time.thread_time() - began) / count * self.ranks_per_core

    def _run(self, functions: Sequence[Callable[[], object]], calls: int) -> float:
        """Seconds of one of `calls` calls, which go round among `functions`."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            for i in range(calls):
                functions[i % len(functions)]()
            return (time.perf_counter() - began) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(SLEEP_HZ * self._host_s * calls))
        begin.record()
        for i in range(calls):
            functions[i % len(functions)]()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3 / calls


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last-level cache."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or ASSUMED_CACHE
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) or ASSUMED_CACHE
