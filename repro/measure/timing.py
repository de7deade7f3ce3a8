"""Clocks for steps and their phases: the host's on CPU, events in the stream on CUDA, read after the window."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from repro.config.enums import STEP_PHASES, Phase

COMPUTING = (Phase.FORWARD, Phase.BACKWARD)
CORE = "core"
"""Processor time of the thread while it computed: less than the phases took if it was kept from its core."""


@dataclass
class StepClock:
    """Marks of consecutive steps.  On CUDA nothing waits until `read`."""

    device: torch.device
    _marks: list[list[tuple[str, float | torch.cuda.Event, float]]] = field(default_factory=list)

    def begin(self) -> None:
        """A step begins."""
        self._marks.append([])

    def mark(self, phase: str) -> None:
        """A phase begins (one of `STEP_PHASES`) or the step ends (`end`)."""
        self._marks[-1].append((phase, self._now(), time.thread_time()))

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[dict[str, float]]:
        """Seconds of every step since the last call: by phase, `step` for the whole, and `CORE`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for marks in self._marks:
            row = dict.fromkeys((*STEP_PHASES, CORE), 0.0)
            for (phase, start, core), (_, stop, core_then) in pairwise(marks):
                row[phase] += self._between(start, stop)
                row[CORE] += core_then - core if phase in COMPUTING else 0.0
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
