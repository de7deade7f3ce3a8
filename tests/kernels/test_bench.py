"""Tests of the GPU benchmark on a CPU: clocks with fake events, and every case and implementation on small tensors."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from repro.kernels import clock as clocks
from repro.kernels.clock import DeviceClock
from repro.results.select import by_key
from repro.results.store import Store
from tests.gpu.bench.case import COMPILED, EAGER, KERNEL, BenchCase, Inputs
from tests.gpu.bench.cases import cases
from tests.gpu.bench.timing import (
    BenchRow,
    DeviceCallClock,
    HostClock,
    copy_bandwidth,
    median_seconds,
    render_table,
)
from tests.gpu.conftest import record

CPU = torch.device("cpu")
CASES = cases()


class Device:
    """Fake device whose work has given durations, with a host whose calls take `host_ms` each.

    `reached` is the time at which the device reaches an event; `host_time_ms` is the time of the host.
    """

    def __init__(self, host_ms: float = 0.0) -> None:
        self.time_ms = self.host_time_ms = 0.0
        self.host_ms = host_ms
        self.log: list[str] = []

    def hold(self, seconds: float) -> None:
        """Start after the host, as an idle device does."""
        self.time_ms = max(self.time_ms, self.host_time_ms) + seconds * 1e3

    def call(self, ms: float, name: str = "call") -> None:
        """Queue `ms` of work, which the device cannot start before the host has queued the call."""
        self.host_time_ms += self.host_ms
        self.log.append(name)
        self.time_ms = max(self.time_ms, self.host_time_ms) + ms

    def perf_counter(self) -> float:
        return self.host_time_ms / 1e3

    def event(self) -> Any:
        device = self

        class Event:
            at = 0.0

            def record(self) -> None:
                device.log.append("event")
                self.at = device.time_ms

            def query(self) -> bool:
                return device.host_ms > 0 and self.at <= device.host_time_ms

            def synchronize(self) -> None:
                device.log.append("wait")
                device.host_time_ms = max(device.host_time_ms, device.time_ms)

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        return Event()


def test_clock_measures_the_call_without_the_cache_flush() -> None:
    device = Device()
    hold = lambda s: device.log.append("hold")
    clock = DeviceCallClock(DeviceClock(device.event, lambda: device.call(7.0, "flush"), hold))
    clock.run(lambda: device.call(2.0))
    assert device.log == ["hold", "flush", "event", "call", "event", "wait"]
    assert clock.total_seconds() == pytest.approx(2e-3)
    clock.run(lambda: device.call(3.0))
    assert clock.total_seconds() == pytest.approx(5e-3)


@pytest.mark.parametrize("calls", [1, 5])
def test_device_time_contains_no_host_time(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the host ten times as long as the device; the clock measures host time separately."""
    device = Device(host_ms=1.0)
    monkeypatch.setattr(clocks, "time", device)
    clock = DeviceClock(device.event, lambda: None, device.hold)
    found = clock.queued_seconds([lambda: device.call(0.1)] * calls)
    assert found == pytest.approx(calls * 0.1e-3)
    assert clock.host_s == pytest.approx(calls * 1e-3)


def test_a_call_that_waits_for_the_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(host_ms=1.0)
    monkeypatch.setattr(clocks, "time", device)

    def waiting() -> None:
        device.call(2.0)
        device.host_time_ms = device.time_ms

    clock = DeviceClock(device.event, lambda: None, device.hold)
    assert clock.queued_seconds([waiting]) >= 2e-3
    assert device.log.count("call") == clocks.MAX_TRIES


def test_median_is_over_alternating_inputs() -> None:
    device = Device()
    clock = DeviceCallClock(DeviceClock(device.event, lambda: None, device.hold))
    calls = [partial(device.call, 1.0, "a"), partial(device.call, 3.0, "b")]
    seconds = median_seconds(clock, calls, rounds=4, warm=2)
    assert [name for name in device.log if name in "ab"] == ["a", "b"] * 3
    assert seconds == pytest.approx(2e-3)


def test_copy_bandwidth_counts_reads_and_writes() -> None:
    device = Device()
    clock = DeviceCallClock(DeviceClock(device.event, lambda: None, device.hold))
    run = clock.run
    clock.run = lambda call: run(lambda: device.call(0.5))  # type: ignore[method-assign,assignment]
    assert copy_bandwidth(clock, CPU, size=1000, rounds=3) == pytest.approx(2 * 1000 / 0.5e-3)


def results_of(case: BenchCase, who: str, inputs: Inputs) -> list[Tensor]:
    """Return the results of an implementation on copies of the inputs, and the tensors that it overwrites."""
    copies = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)
    result = case.way(who)(copies)
    changed = [copies[name] for name in ("states", "tensors") if name in copies]
    return [t.detach() for t in tree_leaves((result, changed)) if isinstance(t, Tensor)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_implementation_runs_on_a_cpu_with_the_same_results(case: BenchCase) -> None:
    """`torch.compile` is omitted: it is slow and compiles the `eager` implementation.

    The results of eager dropout differ, because torch's generator drops other elements.
    """
    assert case.names[0] == KERNEL
    assert {EAGER, COMPILED} <= set(case.names)
    torch.manual_seed(0)
    narrow, wide = (case.inputs(CPU, dtype, 64) for dtype in (torch.bfloat16, torch.float32))
    assert 0 < case.nbytes(narrow) <= case.nbytes(wide)  # in 16 bits, AdamW writes a copy of parameters
    expected = results_of(case, KERNEL, wide)
    for who in case.names:
        if who == COMPILED:
            continue
        clock = HostClock()
        clock.run(partial(results_of, case, who, narrow))
        assert clock.total_seconds() > 0
        found = results_of(case, who, wide)
        if "dropout" in case.name and who == EAGER:
            continue
        for a, b in zip(found, expected, strict=False):
            if a.shape == b.shape:
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


ROWS = [
    BenchRow("bias_gelu", EAGER, "bf16", 2e-3, 10**9, 0.9),
    BenchRow("bias_gelu", KERNEL, "bf16", 1e-3, 10**9, 0.9, 8.25e-6),
    BenchRow("norm", KERNEL, "fp32", 2e-3, 10**9, 0.9),
    BenchRow("norm", EAGER, "fp32", 1e-3, 10**9, 0.9),
]


def test_table_shows_bandwidth_shares_goals_and_faster_implementations() -> None:
    lines = render_table(ROWS, copy=1.05e12)
    assert lines[0] == "copy: 1,050 GB/s"
    assert lines[2].split() == ["bias_gelu", "bf16", "kernel", "1000.0", "1000", "95%", "90%", "1.00", "8.2"]
    assert lines[3].split() == ["eager", "2000.0", "500", "48%", "2.00"]
    assert lines[4].split() == ["norm", "fp32", "kernel", "2000.0", "500", "48%", "90%", "1.00", "*"]
    assert lines[6] == "* below its goal, which is for an H200 or A100"
    assert lines[7] == "faster than the kernel: norm fp32: eager"


def test_record_has_the_rows_and_the_device(tmp_path: Path) -> None:
    written = record(ROWS, 1.05e12, "NVIDIA Test", {"git": None})
    with Store(tmp_path) as store:
        store.append(written)
        (read,) = (record.as_dict() for record in store.records())
    assert (read["kind"], read["device"], read["evidence"]) == ("kernels", "NVIDIA Test", "measured")
    assert read["rows"][0] == {**asdict(ROWS[1]), "bytes_per_s": 1e12}
    assert read["provenance"] == {"git": None}
    with Store(tmp_path) as store:
        assert by_key(store.records()) == {}, "by_key selects experiments only"
