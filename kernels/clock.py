"""Clock of a device, whose seconds contain no host time: `repro calibrate` and the benchmark of the kernels use it.

The device is busy with other work until the host has queued the timed calls. Before the calls, a buffer larger than the
last-level cache is written, so that operands are not cached. Two events around the calls are the device's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 2**29
"""Size of the buffer: several times the last-level cache (50 MiB on H100)."""
MAX_TRIES = 4
"""Maximum number of measurements until one has queued all calls before the device reached them."""
HOLD_MARGIN = 2.0
"""Ratio of the time that the device is occupied to the host's time for the calls."""
MAX_HOLD_S = 50e-3
"""Maximum duration of the work before the calls, in seconds: compilation at a first call takes seconds."""
SLEEP_HZ = 2e9
"""Upper bound of the clock rate of a GPU, in hertz: a sleep that counts cycles takes at least the given time."""


class DeviceClock:
    """Clock of a device, whose seconds contain no host time."""

    def __init__(
        self,
        event: Callable[[], Any] | None = None,
        flush: Callable[[], Any] | None = None,
        hold: Callable[[float], Any] | None = None,
    ):
        """Measure torch's current device.

        `flush` queues a write of the last-level cache. `hold` queues work of at least the given seconds, by default a
        sleep. Tests pass their own `event`, `flush` and `hold`.
        """
        self.host_s = 0.0
        """Host time of the last calls, in seconds."""
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._flush = flush or self._write
        self._hold = hold or _sleep
        self._buffer: Tensor | None = None

    def queued_seconds(
        self, calls: Sequence[Callable[[], Any]], queued: Callable[[], Any] = lambda: None
    ) -> float:
        """Return the device's seconds of all `calls`.

        `queued` runs when all calls are queued and the device is busy. If the device reaches the calls before all are
        queued, the measurement is repeated after a longer hold. A call that waits for the device is never queued in
        time; then the last measurement counts.
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
    """Let the device sleep."""
    torch.cuda._sleep(int(SLEEP_HZ * seconds))
