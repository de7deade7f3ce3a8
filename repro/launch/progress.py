"""Progress of a running suite on standard error: a live display on a terminal, lines in a file or pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from repro.config.enums import Phase
from repro.launch.job import Job
from repro.launch.rank_process import Position
from repro.util import units
from repro.util.console import stderr

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

REPORT_INTERVAL_S = 10.0
"""Minimum time between two progress lines without a terminal, in seconds."""
BAR_COLUMNS = 12
"""Width of a progress bar, in columns."""
FIXED_COLUMNS = BAR_COLUMNS + 46
"""Width of a progress line without the experiment's name, in columns."""
REFRESHES_PER_S = 2
"""Refresh rate of the progress display, per second; low, because the display takes processor time from the ranks."""


class Progress:
    """Context manager that counts the experiments of a suite and displays their progress."""

    def __init__(self, total: int, known: int):
        self.total, self.known, self.done = total, known, 0
        self.running: JobStepCounters | None = None
        """Counters of the running launch's training steps, one per experiment; None before the first launch."""
        self._began = time.monotonic()
        self._printed_s = self._began
        self._lines: dict[int, TaskID] = {}
        """Progress line of each experiment, by the experiment's index in the job."""
        self._bars = _bars() if sys.stderr.isatty() else None
        if self._bars is not None:
            self._all = self._bars.add_task("all", total=total, place="experiments", rate="", left="")

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        if self.known:
            self.say(f"{self.known} experiments already have a record, {self.total} to run")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def launch(self, job: Job) -> None:
        """Display the progress of a new launch: a line per experiment of a comparison, else only for the first one."""
        self.running = JobStepCounters(job)
        self._printed_s = time.monotonic()
        if self._bars is not None:
            self._clear()
            for i in range(len(job.experiments) if job.compare else 1):
                self._line(i, "starting")

    def tick(self, position: Position) -> None:
        """Display the step and phase of rank 0 of the running launch."""
        if not position.begun or self.running is None:
            return
        steps = self.running.update(position)
        if position.phase == Phase.DONE:  # An ended experiment has no progress line.
            return
        if self._bars is not None:
            self._line(position.experiment, str(position.phase))
        elif time.monotonic() - self._printed_s > REPORT_INTERVAL_S:
            speed = _rate(steps.rate), _time_left(self.running.left_s(steps))
            parts = [f"step {steps.done} of {steps.total}", str(position.phase), *filter(None, speed)]
            name = self.running.job.experiments[position.experiment].name
            self.say(f"  {name}: {', '.join(parts)} ({self._left()})")

    def _line(self, experiment: int, place: str) -> None:
        """Update the progress line of an experiment. Only a comparison has several progress lines at the same time."""
        assert self._bars is not None
        assert self.running is not None
        job, counters = self.running.job, self.running.steps
        if experiment not in self._lines:
            if not job.compare:
                self._clear()
            name = job.experiments[experiment].name
            columns = max(12, self._bars.console.width - FIXED_COLUMNS)
            short = name if len(name) <= columns else f"{name[: columns - 1]}…"
            self._lines[experiment] = self._bars.add_task(short, total=None, place="", rate="", left="")
        steps = counters[experiment]
        self._bars.update(
            self._lines[experiment],
            completed=steps.done,
            total=None if place == "starting" else steps.total,
            place=place,
            rate=_rate(steps.rate),
        )
        for at, line in self._lines.items():  # In a comparison, each line shows the total time left.
            self._bars.update(line, left=_time_left(self.running.left_s(counters[at])))

    def _clear(self) -> None:
        """Remove the progress lines of all experiments from the display."""
        assert self._bars is not None
        for line in self._lines.values():
            self._bars.remove_task(line)
        self._lines.clear()

    def ended(self, name: str, outcome: str, reason: str, seconds: float, *, expected: bool) -> None:
        """Count one ended experiment, and print its outcome if the suite does not expect the outcome."""
        self.done += 1
        if not expected:
            why = f": {reason}" if reason else ""
            self.say(f"{name}: unexpected outcome {outcome} after {units.seconds(seconds)}{why}")
        if self._bars is not None:
            self._bars.update(self._all, completed=self.done)
            for at, line in list(self._lines.items()):
                if self.running is not None and self.running.job.experiments[at].name == name:
                    self._bars.remove_task(line)
                    del self._lines[at]
        elif expected and time.monotonic() - self._printed_s > REPORT_INTERVAL_S:
            self.say(f"  {self.done} of {self.total} experiments ({self._left()})")

    def elsewhere(self, count: int) -> None:
        """Count `count` more experiments as done, because another `repro run` on the store has finished them."""
        self.done += count
        if self._bars is not None:
            self._bars.update(self._all, completed=self.done)

    def say(self, text: str) -> None:
        """Print one line to standard error, above the progress display if there is one."""
        self._printed_s = time.monotonic()
        if self._bars is not None:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _left(self) -> str:
        elapsed = int(time.monotonic() - self._began)
        return f"{self.total - self.done} left, {elapsed // 60}:{elapsed % 60:02d} elapsed"


def _rate(per_s: float | None) -> str:
    """Format a number of steps per second as `3.1 steps/s` or `12.3 s/step`; empty for None."""
    if per_s is None:
        return ""
    return f"{units.number(per_s)} steps/s" if per_s >= 1 else f"{units.number(1 / per_s)} s/step"


def _time_left(seconds: float | None) -> str:
    """Format a time in seconds as `1:02:03 left`; empty for None."""
    return "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"


def _bars() -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=BAR_COLUMNS),
        MofNCompleteColumn(),
        TextColumn("{task.fields[place]}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        console=stderr(),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    )


@dataclass
class StepCounter:
    """Counter of one experiment's steps, with their rate. The first observed step is not timed."""

    total: int
    """Number of steps to run. A comparison that initialises experiments in each turn repeats their untimed steps."""
    done: int = 0
    _at: int | None = None
    """Training step at the last update; None before the first update."""
    _from: int | None = None
    """Number of completed steps when timing began; None before timing."""
    _spent: float = 0.0
    """Seconds for which the experiment has run since timing began, without the turns of other experiments."""

    def update(self, step: int, seconds: float) -> None:
        """Record the experiment's `step`, after the ranks have run it for `seconds` since the last update."""
        if self._from is not None:
            self._spent += seconds
        if self._at is None:
            self.done = step  # a resumed training begins at the step of its checkpoint
        elif step != self._at:
            # Compared experiments run in turns. A smaller step number means that the next turn began, at step 0.
            self.done += step - self._at if step > self._at else step
            self._from = self.done if self._from is None else self._from
        self._at = step

    @property
    def rate(self) -> float | None:
        """Return the number of steps per second while the experiment runs; None if no step is timed."""
        timed = self.done - self._from if self._from is not None else 0
        return timed / self._spent if timed > 0 and self._spent > 0 else None

    @property
    def left_s(self) -> float | None:
        """Return the remaining time of the experiment, in seconds; None while the rate is unknown."""
        return None if self.rate is None else max(0, self.total - self.done) / self.rate


class JobStepCounters:
    """Counters of the training steps of one launch: a counter per experiment, with done and total steps and rate."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic):
        turns = job.rounds if job.apart else 1
        trainings = [experiment.training for experiment in job.experiments]
        self.steps = [StepCounter(turns * t.untimed_steps + t.steps - t.untimed_steps) for t in trainings]
        self.job, self._clock, self._last = job, clock, clock()

    def update(self, position: Position) -> StepCounter:
        """Update the step counter of the experiment that rank 0 runs to `position`, and return the counter."""
        now = self._clock()
        current = self.steps[position.experiment]
        current.update(position.step, now - self._last)
        self._last = now
        return current

    def left_s(self, steps: StepCounter) -> float | None:
        """Return the remaining seconds of the experiment with counter `steps`; in a comparison, of all experiments."""
        together: Sequence[StepCounter] = self.steps if self.job.compare else [steps]
        each = [one.left_s for one in together]
        return sum(one for one in each if one is not None) if None not in each else None
