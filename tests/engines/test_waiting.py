"""Stages seen to wait, by the clock outside of engines: for messages of any kind, and as long as the schedule says."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config.enums import Phase
from repro.measure.timing import StepClock
from repro.measure.waiting import StageWaits
from tests.engines.slowed import BACKWARD_S, FORWARD_S, SCHEDULES, busy_and_idle, of_formula
from tests.pool import RankPool

LATE_S = 0.3


def _irecv(tensor: Tensor) -> None:
    message = dist.isend(tensor, 0) if dist.get_rank() else dist.irecv(tensor, 1)
    assert message is not None
    message.wait()


def _batch(tensor: Tensor) -> None:
    operation = dist.P2POp(dist.isend, tensor, 0) if dist.get_rank() else dist.P2POp(dist.irecv, tensor, 1)
    for message in dist.batch_isend_irecv([operation]):
        message.wait()


def waited(message: Callable[[Tensor], None]) -> dict[str, float]:
    """Seconds by phase on each of two ranks, of which the second one comes late to a message."""
    clock = StepClock(torch.device("cpu"))
    dist.barrier()
    clock.begin()
    with StageWaits(clock.mark) as observe:
        time.sleep(LATE_S * dist.get_rank())
        message(torch.zeros(8))
        observe(Phase.IDLE)  # an engine's own word for it, which is not heard
        time.sleep(0.1)
        observe(Phase.OPTIMIZER)
    clock.mark("end")
    message(torch.zeros(8))  # outside nothing is marked any more
    (row,) = clock.read()
    return row


@pytest.mark.parametrize("message", [_irecv, _batch, dist.all_reduce])
def test_who_waits_for_a_message_is_idle(two: RankPool, message: Callable[[Tensor], None]) -> None:
    early, late = two.run(waited, message)
    assert 0.9 * LATE_S < early[Phase.IDLE] < 1.5 * LATE_S
    assert late[Phase.IDLE] < 0.5 * LATE_S
    assert 0.1 <= early[Phase.FORWARD] < 0.1 + 0.5 * LATE_S
    assert 0.1 + LATE_S <= late[Phase.FORWARD] < 0.1 + 1.5 * LATE_S


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_waits_for_its_part_of_the_passes(two: RankPool, engine: str, name: str) -> None:
    """Our engine says so of itself too."""
    layout = SCHEDULES[name]
    busy, idle, own = busy_and_idle(two, layout, engine)
    assert busy > layout.accumulation * layout.chunks * (FORWARD_S + BACKWARD_S)
    assert idle / busy == pytest.approx(of_formula(layout), abs=0.05)
    if engine == "native":
        assert own == pytest.approx(idle, abs=0.05)
