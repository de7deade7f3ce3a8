"""Seconds of steps and their phases: the host's clock on CPU, events in the stream on CUDA; idle time of stages."""

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
"""Processor time of the thread in the compute phases, without the time in which it waited for its core."""


@dataclass
class StepClock:
    """Records the phases of consecutive steps.  On CUDA only `read` waits for the device."""

    device: torch.device
    _marks: list[list[tuple[str, float | torch.cuda.Event, float]]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a step."""
        self._marks.append([])

    def mark(self, phase: str) -> None:
        """Begin a phase (one of `STEP_PHASES`), or end the step (`end`)."""
        self._marks[-1].append((phase, self._now(), time.thread_time()))

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[dict[str, float]]:
        """Return the seconds of every step since the last call: by phase, `step` for the sum, and `CORE_TIME`."""
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
    """Idle time of a pipeline stage (2104.04473 sec. 2.2), measured without the engine's help.

    Use it as a context manager around a step and as the step's observer.  It passes the engine's phases to `mark`,
    except `idle`, which it marks around every `torch.distributed.Work.wait`.  Schedules in Python (Megatron-core's,
    `torch.distributed.pipelining`, the native engine's) wait for messages there.  The idle time is right only if stages
    are the only parallelism, since then each wait is for another stage.
    """

    def __init__(self, mark: Callable[[Phase], None]):
        self._mark, self._phase = mark, Phase.FORWARD

    def __call__(self, phase: Phase) -> None:
        """Record the beginning of a phase, as reported by the engine."""
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
        self(Phase.FORWARD)  # time before the first pass or wait counts as work
        return self

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]
