"""Stages seen to wait, by the clock outside of engines: for messages of any kind, and as long as the schedule says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config.enums import Phase
from repro.measure.timing import StageWaits, StepClock
from tests.engines.needs import needs
from tests.engines.slowed import BACKWARD_S, FORWARD_S, SCHEDULES, busy_and_idle, of_formula
from tests.engines.told_time import told_time
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


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def waited(message: Callable[[Tensor], None]) -> dict[str, float]:
    """Seconds by phase on each of two ranks, of which the second one comes late to a message."""
    with told_time() as told:
        clock = StepClock(torch.device("cpu"))
        clock.begin()
        with StageWaits(clock.mark) as observe:
            told.sleep(LATE_S * dist.get_rank())
            message(torch.zeros(8))
            observe(Phase.IDLE)  # an engine's own word for it, which is not heard
            told.sleep(0.1)
            observe(Phase.OPTIMIZER)
        clock.mark("end")
        message(torch.zeros(8))  # outside nothing is marked any more
        (row,) = clock.read()
    return row


@pytest.mark.parametrize("message", [_irecv, _batch, _all_reduce])
def test_who_waits_for_a_message_is_idle(two: RankPool, message: Callable[[Tensor], None]) -> None:
    early, late = two.run(waited, message)
    assert early[Phase.IDLE] == pytest.approx(LATE_S)
    assert early[Phase.FORWARD] == pytest.approx(0.1)
    assert late[Phase.IDLE] == 0
    assert late[Phase.FORWARD] == pytest.approx(LATE_S + 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("torch", marks=needs("torch"))])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_waits_for_its_part_of_the_passes(two: RankPool, engine: str, name: str) -> None:
    """Our engine says so of itself too."""
    layout = SCHEDULES[name]
    for busy, idle, own in busy_and_idle(two, layout, engine):
        assert busy == pytest.approx(layout.accumulation * layout.chunks * (FORWARD_S + BACKWARD_S))
        assert idle / busy == pytest.approx(of_formula(layout))
        if engine == "native":
            assert own == pytest.approx(idle)
