"""Times of steps and their phases, from the host's clock or CUDA events, and idle times of pipeline stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from repro.config.enums import STEP_PHASES, Phase

COMPUTE_PHASES = (Phase.FORWARD, Phase.BACKWARD)
CORE_TIME = "core"
"""Key of the thread's CPU seconds in a step's forward and backward passes; waiting for a core does not count."""


@dataclass
class StepClock:
    """Clock that records when the phases of consecutive steps begin.  On CUDA, only `read` waits for the device."""

    device: torch.device
    _marks: list[list[tuple[str, float | torch.cuda.Event, float]]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin to record the phases of a new training step."""
        self._marks.append([])

    def mark(self, phase: str) -> None:
        """Record the time at which a phase of the step (one of `STEP_PHASES`) begins, or the step ends (`end`)."""
        self._marks[-1].append((phase, self._now(), time.thread_time()))

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[dict[str, float]]:
        """Return, per step since the last call, the seconds by phase, step time (`step`) and CPU time (`core`)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for marks in self._marks:
            row = dict.fromkeys((*STEP_PHASES, CORE_TIME), 0.0)
            for (phase, start, core), (_, stop, core_then) in pairwise(marks):
                row[phase] += self._between(start, stop)
                row[CORE_TIME] += core_then - core if phase in COMPUTE_PHASES else 0.0
            row["step"] = self._between(marks[0][1], marks[-1][1])
            found.append(row)
        self._marks.clear()
        return found

    @staticmethod
    def _between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
        if isinstance(start, float) or isinstance(stop, float):
            assert isinstance(start, float)
            assert isinstance(stop, float)
            return stop - start
        return start.elapsed_time(stop) / 1e3


class StageWaits:
    """Idle time of a pipeline stage (2104.04473 sec. 2.2), measured in the same way for every engine.

    The object is a context manager around a step and the step's observer.  It passes the engine's phases to `mark`, but
    begins `idle` itself at every `torch.distributed.Work.wait`, where engines wait for messages.  The idle time is
    correct only for pure pipeline parallelism, where every wait is for a message of another stage.
    """

    def __init__(self, mark: Callable[[Phase], None]):
        self._mark, self._phase = mark, Phase.FORWARD

    def __call__(self, phase: Phase) -> None:
        """Record the beginning of a phase of the step, which the engine reports."""
        if phase != Phase.IDLE:
            self._phase = phase
            self._mark(phase)

    def __enter__(self) -> StageWaits:
        self._wait = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **named: Any) -> bool:
            self._mark(Phase.IDLE)
            try:
                return self._wait(work, *arguments, **named)
            finally:
                self._mark(self._phase)

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        self(Phase.FORWARD)  # A step's time before its first forward pass or wait counts as forward time.
        return self

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]
