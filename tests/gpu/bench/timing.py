"""Clocks of single calls on a device and on the host, and the table of all cases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from repro.kernels.clock import DeviceClock
from tests.gpu.bench.case import KERNEL


class HostClock:
    """Clock of the host. It runs calls and adds up their seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.host_s = 0.0
        """Host time of the last run, in seconds."""

    def total_seconds(self) -> float:
        """Return the seconds of all calls, a timer for pytest-benchmark, which takes differences."""
        return self.seconds

    def run(self, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        call()
        self.host_s = time.perf_counter() - began
        self.seconds += self.host_s


class DeviceCallClock(HostClock):
    """Clock of a device that adds up the seconds of calls."""

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__()
        self.clock = clock

    def run(self, call: Callable[[], Any]) -> None:
        self.seconds += self.clock.queued_seconds([call])
        self.host_s = self.clock.host_s


def benchmark_clock(device: torch.device) -> HostClock:
    return DeviceCallClock(DeviceClock()) if device.type == "cuda" else HostClock()


def median_seconds(clock: HostClock, calls: list[Callable[[], Any]], rounds: int, warm: int = 3) -> float:
    """Return the median seconds of `rounds` calls, which cycle through `calls`."""
    times = []
    for i in range(warm + rounds):
        before = clock.total_seconds()
        clock.run(calls[i % len(calls)])
        times.append(clock.total_seconds() - before)
    return statistics.median(times[warm:])


def copy_bandwidth(clock: HostClock, device: torch.device, size: int = 2**29, rounds: int = 20) -> float:
    """Return the bytes that torch's copy of `size` bytes reads and writes per second."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / median_seconds(clock, [lambda: target.copy_(source)], rounds)


@dataclass(frozen=True)
class BenchRow:
    """Time of one case by one implementation."""

    case: str
    who: str
    dtype: str
    seconds: float
    """Median seconds of the device."""
    nbytes: int
    goal: float
    overhead_s: float | None = None
    """Median seconds of the host to queue a call; None if the host is the device."""

    @property
    def bandwidth(self) -> float:
        """Necessary traffic in bytes/s."""
        return self.nbytes / self.seconds


def render_table(rows: Sequence[BenchRow], copy: float) -> list[str]:
    """Return the lines of a table. `copy` is in bytes/s. Each case begins with our kernel."""
    lines = [
        f"copy: {copy / 1e9:,.0f} GB/s",
        f"{'':<35}{'':<6}{'':<16}{'us':>10}{'GB/s':>9}{'of copy':>9}{'goal':>7}{'x kernel':>10}{'host us':>10}",
    ]
    kernels = {(row.case, row.dtype): row for row in rows if row.who == KERNEL}
    faster: set[str] = set()
    last = ("", "")
    for row in _sorted_rows(rows):
        head = (row.case, row.dtype)
        name, dtype = head if head != last else ("", "")
        last, ours = head, kernels.get(head)
        if ours and row.seconds < ours.seconds:
            faster.add(f"{row.case} {row.dtype}: {row.who}")
        share, goal = row.bandwidth / copy, f"{row.goal:.0%}" if row.goal and row.who == KERNEL else ""
        missed = " *" if row.who == KERNEL and row.goal and share < row.goal else ""
        times = f"{row.seconds / ours.seconds:.2f}" if ours else ""
        host = f"{row.overhead_s * 1e6:.1f}" if row.overhead_s is not None else ""
        lines.append(
            f"{name:<35}{dtype:<6}{row.who:<16}{row.seconds * 1e6:>10.1f}{row.bandwidth / 1e9:>9.0f}"
            f"{share:>9.0%}{goal:>7}{times:>10}{host:>10}{missed}"
        )
    if any(line.endswith(" *") for line in lines):
        lines.append("* below its goal, which is for an H200 or A100")
    return lines + [f"faster than the kernel: {text}" for text in sorted(faster)]


def as_data(rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data, in the order of the table, with their `bytes_per_s`."""
    return [{**asdict(row), "bytes_per_s": row.bandwidth} for row in _sorted_rows(rows)]


def _sorted_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows by case and dtype in order of appearance, with our kernel first."""
    order = {key: i for i, key in enumerate(dict.fromkeys((row.case, row.dtype) for row in rows))}
    return sorted(rows, key=lambda row: (order[row.case, row.dtype], row.who != KERNEL))
