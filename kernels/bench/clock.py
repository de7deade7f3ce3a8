"""Seconds that a device spends on a call, without what the host takes to queue it.

Before each call a buffer larger than the last-level cache is written: nothing that the call reads is cached, and
the device is still busy when the call is queued, so that it starts as soon as the buffer is done. The two events
around it are the device's own clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 2**29
"""Several times the last-level cache of any GPU (50 MiB on H100), and 0.1 ms or more of writing."""


class Clock:
    """Runs calls and adds up their seconds; `now` is a timer for pytest-benchmark, which takes differences."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Seconds of all calls so far."""
        return self.seconds

    def run(self, call: Callable[[], Any]) -> None:
        """Call, and add its seconds."""
        began = time.perf_counter()
        call()
        self.seconds += time.perf_counter() - began


class DeviceClock(Clock):
    """Counts the seconds of a device."""

    def __init__(self, event: Callable[[], Any] | None = None, flush: Callable[[], Any] | None = None):
        """By default torch's current device; tests bring a flush and events like `torch.cuda.Event` of their own."""
        super().__init__()
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._flush = flush or self._write
        self._buffer: Tensor | None = None

    def run(self, call: Callable[[], Any]) -> None:
        start, stop = self._event(), self._event()
        self._flush()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        self.seconds += start.elapsed_time(stop) / 1e3

    def _write(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._buffer.zero_()


def clock_of(device: torch.device) -> Clock:
    """The clock of a kind of device."""
    return DeviceClock() if device.type == "cuda" else Clock()


def median_seconds(clock: Clock, calls: list[Callable[[], Any]], rounds: int, warm: int = 3) -> float:
    """Median over `rounds` calls that take turns."""
    times = []
    for i in range(warm + rounds):
        before = clock.now()
        clock.run(calls[i % len(calls)])
        times.append(clock.now() - before)
    return statistics.median(times[warm:])


def copy_bandwidth(clock: Clock, device: torch.device, size: int = 2**29, rounds: int = 20) -> float:
    """Bytes read and written a second by torch's copy of `size` bytes: what memory can do."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / median_seconds(clock, [lambda: target.copy_(source)], rounds)


def overhead_seconds(
    call: Callable[[], Any], calls: int = 200, rounds: int = 5, wait: Callable[[], Any] | None = None
) -> float:
    """Seconds of the host a call, the device never waited for: the best of `rounds` of so many `calls`."""
    wait = wait or (torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    best = float("inf")
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    wait()
    return best
