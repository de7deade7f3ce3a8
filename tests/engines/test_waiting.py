"""Tests of measured idle times of stages: waits for all kinds of messages, and the bubbles of schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config.enums import Phase
from repro.measure.timing import StageWaits, StepClock
from tests.engines.needs import needs
from tests.engines.virtual_time import (
    BACKWARD_S,
    FORWARD_S,
    SCHEDULES,
    bubble_fraction,
    busy_and_idle,
    virtual_time,
)
from tests.pool import RankPool

DELAY_S = 0.3


def _irecv(tensor: Tensor) -> None:
    message = dist.isend(tensor, 0) if dist.get_rank() else dist.irecv(tensor, 1)
    assert message is not None
    message.wait()


def _batch(tensor: Tensor) -> None:
    operation = dist.P2POp(dist.isend, tensor, 0) if dist.get_rank() else dist.P2POp(dist.irecv, tensor, 1)
    for message in dist.batch_isend_irecv([operation]):
        message.wait()


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def seconds_by_phase(message: Callable[[Tensor], None]) -> dict[str, float]:
    """Return this rank's seconds by phase; rank 1 sends its message after a delay."""
    with virtual_time() as time:
        clock = StepClock(torch.device("cpu"))
        clock.begin()
        with StageWaits(clock.mark) as observe:
            time.sleep(DELAY_S * dist.get_rank())
            message(torch.zeros(8))
            observe(Phase.IDLE)  # `StageWaits` ignores the idle phase that an engine reports
            time.sleep(0.1)
            observe(Phase.OPTIMIZER)
        clock.mark("end")
        message(torch.zeros(8))  # outside `StageWaits`, no wait is marked
        (row,) = clock.read()
    return row


@pytest.mark.parametrize("message", [_irecv, _batch, _all_reduce])
def test_wait_for_a_message_counts_as_idle_time(two: RankPool, message: Callable[[Tensor], None]) -> None:
    early, late = two.run(seconds_by_phase, message)
    assert early[Phase.IDLE] == pytest.approx(DELAY_S)
    assert early[Phase.FORWARD] == pytest.approx(0.1)
    assert late[Phase.IDLE] == 0
    assert late[Phase.FORWARD] == pytest.approx(DELAY_S + 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("torch", marks=needs("torch"))])
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_of_schedules_equals_the_bubble_formula(two: RankPool, engine: str, name: str) -> None:
    """Engine native also reports this idle time."""
    layout = SCHEDULES[name]
    for busy, idle, reported in busy_and_idle(two, layout, engine):
        assert busy == pytest.approx(layout.accumulation * layout.chunks * (FORWARD_S + BACKWARD_S))
        assert idle / busy == pytest.approx(bubble_fraction(layout))
        if engine == "native":
            assert reported == pytest.approx(idle)
