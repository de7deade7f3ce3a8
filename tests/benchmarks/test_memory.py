"""What it costs to follow memory: operators under the tracker, with few and with many tensors alive.

make benchmarks
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from repro.measure.memory import MemoryTracker

OPERATORS = 1000


def follow(live: int) -> float:
    """CPU seconds of `OPERATORS` small operators while `live` tensors are alive."""
    with MemoryTracker() as tracker:
        kept = torch._foreach_add(torch.zeros(live).split(1), 1.0)  # storages of their own, by one operator
        start = time.process_time()
        for tensor in kept[:OPERATORS]:
            tensor.add(1)
        seconds = time.process_time() - start
    assert tracker.live()["total"] >= 4 * live
    return seconds


@pytest.mark.parametrize("live", [1000, 4000, 16000])
def test_following_costs_the_same_however_much_is_alive(benchmark: Any, live: int) -> None:
    benchmark.group = f"{OPERATORS} operators followed"
    benchmark.pedantic(follow, args=(live,), rounds=3, iterations=1)
