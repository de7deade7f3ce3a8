"""Benchmark of the memory tracker: the time of operators with few and with many live tensors.

make benchmarks
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from repro.measure.memory import MemoryTracker

OPERATORS = 1000


def seconds_with_tracker(live: int) -> float:
    """Return the CPU seconds of `OPERATORS` tracked small operators while `live` tensors are alive."""
    with MemoryTracker() as tracker:
        tensors = torch._foreach_add(torch.zeros(live).split(1), 1.0)  # creates separate storages
        start = time.process_time()
        for tensor in tensors[:OPERATORS]:
            tensor.add(1)
        seconds = time.process_time() - start
    assert tracker.live()["total"] >= 4 * live
    return seconds


@pytest.mark.parametrize("live", [1000, 4000, 16000])
def test_tracking_time_with_many_live_tensors(benchmark: Any, live: int) -> None:
    benchmark.group = f"{OPERATORS} tracked operators"
    benchmark.pedantic(seconds_with_tracker, args=(live,), rounds=3, iterations=1)
