"""What a person sees while a suite runs, on standard error: a live display, or lines if no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from repro.config import Experiment
from repro.launch.beacon import Position
from repro.render import units, words
from repro.render.console import stderr

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

HEARTBEAT_S = 10.0
"""Without a terminal, a running experiment says where it is this often."""
REFRESH_PER_S = 2
"""Few, since on a small machine the display takes its time from the ranks."""


class Progress:
    """Counts experiments; a context manager."""

    def __init__(self, total: int, known: int):
        self.total, self.known, self.done = total, known, 0
        self._began = time.monotonic()
        self._spoke = self._began
        self._experiments: list[Experiment] = []
        self._bars = _bars() if sys.stderr.isatty() else None
        if self._bars is not None:
            self._all = self._bars.add_task("all", total=total, place="experiments")
            self._one = self._bars.add_task("", total=None, visible=False, place="")

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        if self.known:
            self.say(f"{self.known} already in the store, {self.total} to run")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def launch(self, experiments: list[Experiment], *, compare: bool) -> None:
        """One launch of these experiments starts."""
        self._experiments = experiments
        self._spoke = time.monotonic()
        world = experiments[0].layout.world
        if self._bars is not None:
            self._bars.update(
                self._one, description=experiments[0].name, completed=0, total=None, visible=True
            )
            self._bars.update(self._one, place="starting")
            return
        names = (
            experiments[0].name
            if len(experiments) == 1
            else f"{experiments[0].name} and {len(experiments) - 1} more"
        )
        how = " compared," if compare else ""
        self.say(f"start {names},{how} {words.counted(world, 'rank')} ({self._left()})")

    def tick(self, position: Position) -> None:
        """Rank 0 of the running launch is at `position`."""
        if not position.begun:
            return
        experiment = self._experiments[position.experiment]
        steps = experiment.training.steps
        if self._bars is not None:
            self._bars.update(
                self._one,
                description=experiment.name,
                completed=position.step,
                total=steps,
                place=f"steps, {position.phase}",
            )
        elif time.monotonic() - self._spoke > HEARTBEAT_S:
            self.say(
                f"  {experiment.name}: step {position.step} of {steps}, {position.phase} ({self._left()})"
            )

    def ended(self, name: str, outcome: str, reason: str, seconds: float, *, expected: bool) -> None:
        """One experiment has its outcome."""
        self.done += 1
        mark = "" if expected else "  (not expected)"
        why = f"  {reason}" if reason else ""
        width = len(str(self.total))
        self.say(f"[{self.done:{width}}/{self.total}] {name}  {outcome}{mark}  {units.seconds(seconds)}{why}")
        if self._bars is not None:
            self._bars.update(self._all, completed=self.done)
            self._bars.update(self._one, visible=False)

    def elsewhere(self, count: int) -> None:
        """`count` experiments were finished by another `repro run` in the meantime."""
        self.done += count
        if self._bars is not None:
            self._bars.update(self._all, completed=self.done)

    def say(self, text: str) -> None:
        """One line above the display."""
        self._spoke = time.monotonic()
        if self._bars is not None:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _left(self) -> str:
        elapsed = int(time.monotonic() - self._began)
        return f"{self.total - self.done} left, {elapsed // 60}:{elapsed % 60:02d} elapsed"


def _bars() -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[place]}"),
        TimeElapsedColumn(),
        console=stderr(),
        refresh_per_second=REFRESH_PER_S,
        transient=True,
    )
