"""Compare each kernel with torch's operators by the device's own clock: `make bench-gpu`.

Every round writes a buffer that fills the last-level cache, then times one call, which is queued while the device is
busy. Inputs take turns. The table shows the median, the necessary bytes per second, the share of a copy's bandwidth and
the host's time. Nothing is asserted: the goals are in the table. The output of pytest-benchmark shows the spread.
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
"""Sets of inputs that take turns."""
ROUNDS = 20


@cache
def copy() -> float:
    """Bytes a second of a copy, measured once."""
    return copy_bandwidth(CLOCK, DEVICE)


def dtypes() -> list[torch.dtype]:
    """What training uses on this device: a V100 has no bf16."""
    modern = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    return [torch.bfloat16, torch.float32] if modern else [torch.float16, torch.float32]


@pytest.mark.benchmark(timer=CLOCK.total_seconds)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(
    ("case", "who"), [pytest.param(c, who, id=f"{c.name}-{who}") for c in CASES for who in c.names]
)
def test_bandwidth(
    benchmark: BenchmarkFixture, case: BenchCase, who: str, dtype: torch.dtype, measured: dict[str, Any]
) -> None:
    benchmark.group = f"{case.name} {dtype}"
    way = case.way(who)
    sets = [case.inputs(DEVICE, dtype, 1) for _ in range(SETS)]
    turn = iter(range(10**9))
    hosts: list[float] = []

    def once() -> None:
        inputs = sets[next(turn) % SETS]
        CLOCK.run(lambda: way(inputs))
        hosts.append(CLOCK.host_s)

    benchmark.pedantic(once, rounds=ROUNDS, warmup_rounds=2 * SETS)
    overhead = statistics.median(hosts[-ROUNDS:]) if DEVICE.type == "cuda" else None
    nbytes = case.nbytes(sets[0])
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {"GB/s": nbytes / seconds / 1e9, "share of copy": nbytes / seconds / copy()}
    measured["copy"] = copy()
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    measured["rows"].append(BenchRow(case.name, who, name, seconds, nbytes, case.goal, overhead))
