"""How fast the experiments of a running launch go, seen from outside, and how long they still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repro.launch.beacon import Position
from repro.launch.job import Job


@dataclass
class Steps:
    """Of one experiment.  The first step that is seen to end is not timed: it warms up."""

    total: int
    """Those that are not timed come once each turn that is built anew."""
    done: int = 0
    _at: int | None = None
    _from: int | None = None
    """Steps done when the clock began."""
    _spent: float = 0.0

    def at(self, step: int, seconds: float) -> None:
        """It is at `step`, and had the ranks for `seconds` since it was asked last."""
        if self._from is not None:
            self._spent += seconds
        if self._at is None:
            self.done = step  # a checkpoint's steps are done already
        elif step != self._at:
            self.done += step - self._at if step > self._at else step  # less: a turn that begins anew
            self._from = self.done if self._from is None else self._from
        self._at = step

    @property
    def rate(self) -> float | None:
        """Steps a second of its own turns; None until two have ended."""
        timed = self.done - self._from if self._from is not None else 0
        return timed / self._spent if timed > 0 and self._spent > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds of what remains of it."""
        return None if self.rate is None else max(0, self.total - self.done) / self.rate


class Course:
    """All experiments of one launch."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic):
        turns = job.rounds if job.apart else 1
        trainings = [experiment.training for experiment in job.experiments]
        self.steps = [Steps(turns * t.untimed_steps + t.steps - t.untimed_steps) for t in trainings]
        self._take_turns, self._clock, self._last = job.compare, clock, clock()

    def tick(self, position: Position) -> Steps:
        """Rank 0 is at `position`; the experiment that it is about."""
        now = self._clock()
        current = self.steps[position.experiment]
        current.at(position.step, now - self._last)
        self._last = now
        return current

    def left_s(self, steps: Steps) -> float | None:
        """Seconds until `steps` ends: where experiments take turns, all end together."""
        together: Sequence[Steps] = self.steps if self._take_turns else [steps]
        each = [one.left_s for one in together]
        return sum(one for one in each if one is not None) if None not in each else None
