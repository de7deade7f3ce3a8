"""Tests of the step clock with fake clocks."""

from __future__ import annotations

import time

import pytest
import torch

from repro.config.enums import Phase
from repro.measure.timing import CORE_TIME, StepClock


def test_only_forward_and_backward_passes_count_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = iter([10.0, 11.0, 14.0, 15.5, 100.0, 102.0, 103.0])
    cpu = iter([1.0, 1.5, 3.5, 4.25, 7.0, 8.0, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, "end"):
        clock.mark(phase)
    clock.begin()
    for phase in (Phase.FORWARD, Phase.IDLE, "end"):  # gloo computes in an idle phase
        clock.mark(phase)
    first, second = clock.read()
    assert (first[Phase.FORWARD], first[Phase.BACKWARD], first[Phase.OPTIMIZER]) == (1.0, 3.0, 1.5)
    assert (first["step"], first[CORE_TIME]) == (5.5, 2.5)
    assert (second["step"], second[Phase.IDLE], second[CORE_TIME]) == (3.0, 1.0, 1.0)
    assert clock.read() == []
