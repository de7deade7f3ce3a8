"""Steady state of a pipeline: a schedule of few micro-batches stands for one of many.

While forward and backward passes take turns, every stage repeats a period: one micro-batch, or p micro-batches with
interleaved chunks. The times of a period are maxima and sums of the times of preceding periods. Such a system becomes
cyclic: after some periods, all times grow by the same seconds from each period to the q-th period after it (Baccelli
et al., Synchronization and Linearity, 1992, sec. 3.7). Every further cycle then adds exactly these seconds, whatever
follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.config.systems.unknowns import Lanes
from repro.parallel.pipeline.schedule import peak_in_flight
from repro.simulate.time.step_order import StepOrder

REACH = 6
"""Number of actions that must repeat in each stage. A message, a posted receive and the limit of unfinished messages
connect an action with at most so many earlier ones."""
CHUNK_REACH = 2
"""Further actions for each stage with interleaved chunks: a gradient reaches the preceding chunk p micro-batches later.
"""
FIRST_TRANSIENT = 4
"""Periods before the compared ones in the shortest schedule."""
TOLERANCE = 1e-11
"""Maximum relative difference of equal cycles, which rounding explains."""
MIN_SAVING = 1.5
"""Minimum ratio of all micro-batches to the scheduled ones."""


class Cycle(NamedTuple):
    """Repetition of a steady state."""

    micro_batches: int
    seconds: float
    begin: Lanes
    """Position of the last cycle's first action in each stage, [stages]."""
    end: Lanes
    """Position after the last cycle's last action in each stage, [stages]."""


def shorter_counts(layout: Layout, least: int) -> Iterator[int]:
    """Yield few numbers of micro-batches and then twice as many, as long as they save work. None for gpipe.

    `least`: minimum number of micro-batches.
    """
    if layout.schedule == "gpipe":
        return
    unit, length = _period(layout)
    warm_up = peak_in_flight(layout.schedule, 0, layout.pp, layout.accumulation, layout.chunks) - 1
    forwards = warm_up + (FIRST_TRANSIENT + 2) * length // 2 + _reach(layout) // 2
    count = -(-forwards // layout.chunks)
    count = -(-max(count, least) // unit) * unit
    while count * MIN_SAVING < layout.accumulation:
        yield count
        count *= 2


def _period(layout: Layout) -> tuple[int, int]:
    """Return the numbers of micro-batches and of actions of a period."""
    micro_batches = layout.pp if layout.chunks > 1 else 1
    return micro_batches, 2 * micro_batches * layout.chunks


def _reach(layout: Layout) -> int:
    """Return the number of actions that must repeat in each stage."""
    return REACH + CHUNK_REACH * layout.pp * (layout.chunks > 1)


class PeriodSamples:
    """Times of all stages after the last actions of each of the last periods in which all stages take turns."""

    def __init__(self, layout: Layout, order: StepOrder, lanes: int):
        """`lanes`: number of cases of each time."""
        first = order.is_backward.argmax(axis=1) - 1
        self.micro_batches, self.length = _period(layout)
        # The period with the last micro-batch's forward passes is left out, because these may differ.
        turns = order.actions.shape[1] - 2 * int(first.max()) - self.length
        self.reach = _reach(layout)
        self.cycles = max(0, min((turns - self.reach) // self.length, layout.pp))
        """Maximum number of periods of a cycle."""
        self.stop = first + turns
        """Position after the last compared action of each stage."""
        self.stride = min(self.length, self.reach)
        rows, columns = self.cycles * self.stride + self.reach, sum(a.shape[-1] for a in order.awaited)
        self.times = np.zeros((len(first), rows, 1 + columns, lanes))
        """End of each action and of the messages that its stage awaits for it."""
        self.further: dict[tuple[int, int], list[float]] = {}
        """Times of unfinished collectives by stage and row."""

    def rows(self, stages: Lanes, positions: Lanes) -> Lanes:
        """Return the row of `times` for each action of a stage; a negative number for none."""
        periods, before = np.divmod(self.stop[stages] - 1 - positions, self.length)
        rows = periods * self.stride + before
        return np.where((periods >= 0) & (before < self.reach) & (rows < self.times.shape[1]), rows, -1)

    def cycle(self) -> Cycle | None:
        """Return the shortest cycle; None if there is none yet."""
        for periods in range(1, self.cycles + 1):
            apart = periods * self.stride
            seconds = self.times[0, 0, 0] - self.times[0, apart, 0]
            # Most periods that are no cycle differ in the first stage.
            if all(self._grow(times, apart, seconds) for times in (self.times[:1], self.times)) and all(
                self._further_grow(stage, apart, seconds) for stage in {stage for stage, _ in self.further}
            ):
                value = float(seconds[0]) if len(seconds) == 1 else seconds
                begin = self.stop - periods * self.length
                return Cycle(periods * self.micro_batches, value, begin, self.stop)
        return None

    def _grow(self, times: Lanes, apart: int, seconds: Lanes) -> bool:
        """Return whether all times are greater by `seconds` than those `apart` rows before."""
        growth = times[:, : self.reach] - times[:, apart : apart + self.reach]
        return bool(np.all(abs(growth - seconds) <= TOLERANCE * seconds))

    def _further_grow(self, stage: int, apart: int, seconds: Lanes) -> bool:
        """Return whether the further times of a stage are greater by `seconds` than those `apart` rows before."""
        for row in range(self.reach):
            new, old = (self.further.get((stage, at), []) for at in (row, row + apart))
            if len(new) != len(old):
                return False
            if not all(
                np.all(abs(a - b - seconds) <= TOLERANCE * seconds) for a, b in zip(new, old, strict=True)
            ):
                return False
        return True
