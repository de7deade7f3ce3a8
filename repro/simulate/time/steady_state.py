"""Steady state of a pipeline: a schedule of few micro-batches stands for one of many.

While forward and backward passes take turns, every stage repeats a period: one micro-batch, or p micro-batches with
interleaved chunks. The times of a period are maxima and sums of the times of preceding periods. Such a system becomes
cyclic: after some periods, all times grow by the same seconds from each period to the q-th period after it (Baccelli
et al., Synchronization and Linearity, 1992, sec. 3.7). Every further cycle then adds exactly these seconds, whatever
follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from repro.config import Layout
from repro.parallel.pipeline.schedule import BACKWARD, Action
from repro.simulate.time.breakdown import StageTime

MEMORY = 3
"""Number of periods that must repeat. A message, a posted receive and the limit of unfinished messages connect a period
with at most two earlier ones."""
FIRST_TRANSIENT = 5
"""Periods before the compared ones in the shortest schedule."""
TOLERANCE = 1e-11
"""Maximum relative difference of equal cycles, which rounding explains."""
MIN_SAVING = 1.5
"""Minimum ratio of all micro-batches to the scheduled ones."""

Times = list[float]
"""All times of a stage that matter after an action."""


class StageSamples(NamedTuple):
    """State of a stage in the compared periods."""

    times: list[Times]
    """After each action."""
    breakdowns: list[StageTime]
    """After each period; empty without breakdowns."""


class Cycle(NamedTuple):
    """Repetition of a steady state."""

    periods: int
    micro_batches: int
    seconds: float


def shorter_counts(layout: Layout, least: int) -> Iterator[int]:
    """Yield few numbers of micro-batches and then more, as long as they save work. None for gpipe.

    `least`: minimum number of micro-batches.
    """
    if layout.schedule == "gpipe":
        return
    unit = _period_micro_batches(layout)
    count = layout.pp + unit * (MEMORY + FIRST_TRANSIENT)
    count = -(-max(count, least) // unit) * unit
    while count * MIN_SAVING < layout.accumulation:
        yield count
        count = -(-3 * count // (2 * unit)) * unit


def compared_positions(layout: Layout, schedule: Sequence[Sequence[Action]]) -> list[range]:
    """Return for each stage the positions of its actions in the last periods in which all stages take turns.

    The period with the last micro-batch's forward passes is left out, because its forward passes may differ.
    """
    kinds = [[action.kind for action in actions] for actions in schedule]
    first = [of_stage.index(BACKWARD) - 1 for of_stage in kinds]
    length = period_actions(layout)
    turns = 2 * (layout.accumulation * layout.chunks - max(first)) - length
    compared = min(turns // length, MEMORY + layout.pp) * length
    return [range(start + turns - compared, start + turns) for start in first]


def find_cycle(layout: Layout, samples: Sequence[StageSamples]) -> Cycle | None:
    """Return the shortest cycle; None if there is none yet. `samples`: of each stage, at its `compared_positions`."""
    length = period_actions(layout)
    for periods in range(1, len(samples[0].times) // length - MEMORY + 1):
        latest = [of_stage.times[-(periods + MEMORY) * length :] for of_stage in samples]
        seconds = latest[0][periods * length][0] - latest[0][0][0]
        if all(_grow_by(seconds, of_stage, periods * length) for of_stage in latest):
            return Cycle(periods, periods * _period_micro_batches(layout), seconds)
    return None


def _grow_by(seconds: float, times: Sequence[Times], apart: int) -> bool:
    """Return whether all times differ by `seconds` from those `apart` actions before."""
    for before, after in zip(times, times[apart:], strict=False):
        if len(before) != len(after):
            return False
        for old, new in zip(before, after, strict=True):
            if not np.all(abs(new - old - seconds) <= TOLERANCE * seconds):
                return False
    return True


def _period_micro_batches(layout: Layout) -> int:
    return layout.pp if layout.chunks > 1 else 1


def period_actions(layout: Layout) -> int:
    """Return the number of actions of a period."""
    return 2 * _period_micro_batches(layout) * layout.chunks
