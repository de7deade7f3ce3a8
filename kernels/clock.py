"""Timer of calls on a GPU that excludes host time, for `repro calibrate` and the benchmark of the kernels.

The GPU sleeps until the host has queued all timed calls, and CUDA events measure their time. A write of a large buffer
before the calls evicts the operands from the last-level cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 2**29
"""Bytes of the buffer that evicts operands from the last-level cache (50 MiB on H100)."""
MAX_TRIES = 4
"""Maximum tries of a measurement; a try fails if the GPU begins before the host has queued all calls."""
HOLD_MARGIN = 2.0
"""Ratio of the GPU's sleep before timed calls to the host's time for queueing these calls."""
MAX_HOLD_S = 50e-3
"""Maximum sleep of the GPU in seconds, because the host may need seconds of compilation for a first call."""
SLEEP_HZ = 2e9
"""Upper bound of a GPU's clock rate in hertz, which converts the seconds of a sleep to clock cycles."""


class DeviceClock:
    """Timer of calls on torch's current GPU that excludes host time."""

    def __init__(
        self,
        event: Callable[[], Any] | None = None,
        flush: Callable[[], Any] | None = None,
        hold: Callable[[float], Any] | None = None,
    ):
        """Create a timer. The arguments replace functions of a real GPU, which are the defaults.

        `event`: creates a CUDA event. `flush`: queues a write that evicts cached operands. `hold`: queues a sleep of a
        minimum duration in seconds.
        """
        self.host_s = 0.0
        """Seconds in which the host queued the calls of the last measurement."""
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._flush = flush or self._write
        self._hold = hold or _sleep
        self._buffer: Tensor | None = None

    def queued_seconds(
        self, calls: Sequence[Callable[[], Any]], queued: Callable[[], Any] = lambda: None
    ) -> float:
        """Return the seconds that the GPU takes for all `calls` together.

        `queued` runs after all calls are queued. If the GPU begins a call before that, the measurement is repeated
        after a longer sleep. If a call waits for the GPU, every repetition fails, and the last measurement is returned.
        """
        hold_s = HOLD_MARGIN * self.host_s
        for _ in range(MAX_TRIES):
            start, stop = self._event(), self._event()
            self._hold(min(hold_s, MAX_HOLD_S))
            self._flush()
            start.record()
            began = time.perf_counter()
            for call in calls:
                call()
            self.host_s = time.perf_counter() - began
            stop.record()
            is_late = start.query()
            queued()
            stop.synchronize()
            if not is_late:
                break
            hold_s = HOLD_MARGIN * max(hold_s, self.host_s)
        return float(start.elapsed_time(stop)) / 1e3

    def _write(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._buffer.zero_()


def _sleep(seconds: float) -> None:
    """Queue a sleep of at least `seconds` on the GPU."""
    torch.cuda._sleep(int(SLEEP_HZ * seconds))
