"""Benchmark of each kernel and torch's operators by the device's clock: `make bench-gpu`.

Each round overwrites the last-level cache and times one call, which is queued while the device is busy. The rounds
alternate between sets of inputs. The table shows the median, the necessary bytes per second, their share of a copy's
bandwidth, the goal, and the host's time. The benchmark asserts no goal.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from tests.gpu.bench.case import BenchCase
from tests.gpu.bench.cases import cases
from tests.gpu.bench.timing import BenchRow, HostClock, benchmark_clock, copy_bandwidth

pytestmark = [pytest.mark.gpu, pytest.mark.benchmarks]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOCK: HostClock = benchmark_clock(DEVICE)
CASES = cases()
SETS = 2
"""Number of alternating sets of inputs."""
ROUNDS = 20


@cache
def copy_rate() -> float:
    """Return the measured bandwidth of a copy in bytes/s."""
    return copy_bandwidth(CLOCK, DEVICE)


def dtypes() -> list[torch.dtype]:
    """Return the dtypes of training on this device; a V100 does not support bf16."""
    has_bf16 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    return [torch.bfloat16, torch.float32] if has_bf16 else [torch.float16, torch.float32]


@pytest.mark.benchmark(timer=CLOCK.total_seconds)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(
    ("case", "who"), [pytest.param(c, who, id=f"{c.name}-{who}") for c in CASES for who in c.names]
)
def test_bandwidth(
    benchmark: BenchmarkFixture, case: BenchCase, who: str, dtype: torch.dtype, measured: dict[str, Any]
) -> None:
    benchmark.group = f"{case.name} {dtype}"
    implementation = case.way(who)
    sets = [case.inputs(DEVICE, dtype, 1) for _ in range(SETS)]
    rounds = iter(range(10**9))
    host_times: list[float] = []

    def run_once() -> None:
        inputs = sets[next(rounds) % SETS]
        CLOCK.run(lambda: implementation(inputs))
        host_times.append(CLOCK.host_s)

    benchmark.pedantic(run_once, rounds=ROUNDS, warmup_rounds=2 * SETS)
    overhead = statistics.median(host_times[-ROUNDS:]) if DEVICE.type == "cuda" else None
    nbytes = case.nbytes(sets[0])
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {"GB/s": nbytes / seconds / 1e9, "share of copy": nbytes / seconds / copy_rate()}
    measured["copy"] = copy_rate()
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    measured["rows"].append(BenchRow(case.name, who, name, seconds, nbytes, case.goal, overhead))
