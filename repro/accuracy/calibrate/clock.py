"""Clock for single operators: warm-up, empty caches before each repeat, all ranks at once."""

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
"""Default size of the last-level cache, in bytes."""
REPEAT_S = 2e-3
"""Minimum duration of a repeat, in seconds: far above the resolution of the clock."""
CROWDED_S = 40e-3
"""Minimum duration of a repeat if ranks outnumber cores, in seconds: most ranks are busy most of this time."""
MOST_CALLS = 64
SLEEP_HZ = 4e9
"""Twice the clock rate of any GPU, in hertz: the GPU sleeps until the host has enqueued the calls."""


class OperatorTiming(NamedTuple):
    """Seconds of one call, as median and quartiles over repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """Half of the interquartile range, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def timing(seconds: Sequence[float]) -> OperatorTiming:
    """Return median and quartiles of a sample."""
    return OperatorTiming(
        quantile(seconds, 0.5), quantile(seconds, 0.25), quantile(seconds, 0.75), len(seconds)
    )


class OperatorClock:
    """Time calls on one device while the other ranks of the group do the same."""

    def __init__(
        self, device: torch.device, group: Group, repeats: int, neighbours: int = 1, cores: int | None = None
    ):
        """Divide the cache and the `cores` of a node, by default all usable cores, among its `neighbours` ranks."""
        self.device, self.group, self.repeats = device, group, repeats
        self.ranks_per_core = (
            max(1.0, neighbours / (cores or usable_cores())) if device.type == "cpu" else 1.0
        )
        self.cache = max(1, cache_bytes(device) // (neighbours if device.type == "cpu" else 1))
        """This rank's part of the last-level cache, in bytes; the ranks of a node flush their parts at once."""
        self._host_s = 0.0
        """Host time of one call, in seconds."""
        self._wipe = torch.empty(self.cache + self.cache // 4, dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Overwrite the last-level cache, together with the other ranks of the node."""
        self._wipe.zero_()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, make: Callable[[], Callable[[], object]], nbytes: int) -> OperatorTiming:
        """Return the seconds of one call of the function that `make` returns, which reads and writes `nbytes`.

        The calls rotate through several sets of arguments and results that exceed the cache, because a step does not
        find its operands in the cache either.
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
        results: deque[object] = deque(maxlen=sets)

        def keeping(function: Callable[[], object]) -> Callable[[], object]:
            return lambda: results.append(function())

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
        """Return the seconds of one call on a shared core, from the calls of `CROWDED_S`; `alone()` on an own core.

        `call` receives the number of the call. The measurement uses processor time: ranks leave a barrier at different
        times, so by the wall clock the first and the last rank would have the core alone.
        """
        if self.ranks_per_core == 1:
            return alone()
        end, began, count = time.perf_counter() + CROWDED_S, time.thread_time(), 0
        while not count or time.perf_counter() < end:  # at least one call
            call(count)
            count += 1
        return (time.thread_time() - began) / count * self.ranks_per_core

    def _run(self, functions: Sequence[Callable[[], object]], calls: int) -> float:
        """Return the seconds of one of `calls` calls, which rotate through `functions`."""
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
    """Return the size of the device's last-level cache, in bytes."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or ASSUMED_CACHE
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes) or ASSUMED_CACHE
