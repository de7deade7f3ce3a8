"""What a simulation does, counted: as much for 100,000 GPUs as for 1,000 with fewer of the same replicas."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from types import FrameType
from typing import Any

import pytest

from repro.config import Experiment, Layout, models, systems
from repro.simulate.step import Simulation, simulate

FEW, MANY = 1_000, (10_000, 100_000)


@cache
def counted(gpus: int, interval: bool = False) -> tuple[Simulation, int]:
    """A simulated step of pipelines of tensor-parallel stages, as many as `gpus` hold, of four micro-batches each; and
    how many functions were called for it, by which a loop over ranks in Python would show."""
    dp = gpus // 4
    layout = Layout(tp=2, pp=2, dp=dp, zero=1, global_batch=4 * dp, precision="bf16", recompute=True)
    asked = Experiment(name="x", model=models.load_model("tiny-stages"), layout=layout, system="llama3-h100")
    system = systems.load_system_file(asked.system)
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        found = simulate(asked, system, time=True, record=True, interval=interval)
    finally:
        sys.setprofile(before)
    return found, calls["call"] + calls["c_call"]


@pytest.fixture(scope="module", autouse=True)
def everything_imported() -> None:
    """Or the first one that is counted would import it."""
    counted.__wrapped__(8)


@pytest.mark.parametrize("gpus", MANY)
def test_as_much_is_traced_placed_and_called(gpus: int) -> None:
    (few, before), (many, calls) = counted(FEW), counted(gpus)
    # But for shards without an element: of some buckets there are more replicas than elements.
    for one, other in zip(few.traces, many.traces, strict=True):
        assert len(other.events) == pytest.approx(len(one.events), rel=0.02)
        operators = [sum(1 for _ in traced.operators()) for traced in (one, other)]
        assert operators[1] == pytest.approx(operators[0], rel=0.02)
    placed = [len(found.time.timeline.spans) for found in (few, many) if found.time is not None]
    assert placed[0] > 100
    assert placed[1] == pytest.approx(placed[0], rel=0.02)
    assert calls == pytest.approx(before, rel=0.05)


@pytest.mark.slow
def test_an_interval_calls_as_much() -> None:
    """Where groups lie is found once for all the systems whose unknown numbers differ."""
    counted.__wrapped__(8, True)
    assert counted(MANY[-1], True)[1] == pytest.approx(counted(FEW, True)[1], rel=0.05)
