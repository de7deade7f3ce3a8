"""Steady state of a pipeline schedule: the step time of many micro-batches from a schedule of few micro-batches.

While forward and backward passes alternate, stages repeat a period: one micro-batch, or p of them with interleaved
chunks on p stages. Such a max-plus system becomes cyclic: a cycle of q periods always adds the same seconds (Baccelli
et al., Synchronization and Linearity, 1992, sec. 3.7).
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
"""Number of consecutive passes of a stage that must repeat to prove a cycle. No message links passes further apart."""
CHUNK_REACH = 2
"""Additional passes per pipeline stage that must repeat to prove a cycle of the interleaved schedule (see `REACH`)."""
FIRST_TRANSIENT = 4
"""Number of periods that the shortest schedule runs before the periods that a search for a cycle compares."""
TOLERANCE = 1e-11
"""Maximum relative difference between durations that count as equal; it allows for rounding errors."""
MIN_SAVING = 1.5
"""Minimum ratio of the step's micro-batches to those of a shorter schedule that is timed instead of the full one."""


class Cycle(NamedTuple):
    """Cycle of a steady state: a number of periods after which all times have grown by the same seconds."""

    micro_batches: int
    """Number of micro-batches in a cycle of the schedule."""
    seconds: float
    """Duration of a cycle of the schedule in seconds."""
    begin: Lanes
    """Schedule position of the last cycle's first action in each pipeline stage, as an array [stages]."""
    end: Lanes
    """Schedule position after the last cycle's last action in each pipeline stage, as an array [stages]."""


def shorter_counts(layout: Layout, least: int) -> Iterator[int]:
    """Yield numbers of micro-batches for shorter schedules in which a search may find a cycle.

    The first number is the fewest that may show a cycle. Each further one is twice the preceding number, while it
    shortens the schedule. `least`: minimum number. The schedule `gpipe` has no steady state and no such number.
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
    """Return the number of micro-batches and the number of actions in one period of a pipeline stage's steady state."""
    micro_batches = layout.pp if layout.chunks > 1 else 1
    return micro_batches, 2 * micro_batches * layout.chunks


def _reach(layout: Layout) -> int:
    """Return the number of consecutive actions of a stage that must repeat to prove a cycle."""
    return REACH + CHUNK_REACH * layout.pp * (layout.chunks > 1)


class PeriodSamples:
    """End times of passes late in the steady state (1F1B), which a search for a repeating cycle compares."""

    def __init__(self, layout: Layout, order: StepOrder, lanes: int):
        """`lanes`: number of sampled cases of the uncertain inputs; each time is an array of this length."""
        first = order.is_backward.argmax(axis=1) - 1
        self.micro_batches, self.length = _period(layout)
        # Forward passes of the last micro-batch may differ in duration, so the search for cycles omits the last period.
        turns = order.actions.shape[1] - 2 * int(first.max()) - self.length
        self.reach = _reach(layout)
        self.cycles = max(0, min((turns - self.reach) // self.length, layout.pp))
        """Maximum number of periods in a cycle that the stored end times (`times`) suffice to prove."""
        self.stop = first + turns
        """Schedule position after the last pass of each pipeline stage whose end time is stored in `times`."""
        self.stride = min(self.length, self.reach)
        rows, columns = self.cycles * self.stride + self.reach, sum(a.shape[-1] for a in order.awaited)
        self.times = np.zeros((len(first), rows, 1 + columns, lanes))
        """Ends of late passes, latest first, and of messages they await, [stages, passes, 1 + messages, cases]."""
        self.further: dict[tuple[int, int], list[float]] = {}
        """End times of collectives that are unfinished when a pass ends, by stage and index of the pass in `times`."""

    def rows(self, stages: Lanes, positions: Lanes) -> Lanes:
        """Return the index in `times` of the pass at each schedule position of a stage; -1 for passes not stored."""
        periods, before = np.divmod(self.stop[stages] - 1 - positions, self.length)
        rows = periods * self.stride + before
        return np.where((periods >= 0) & (before < self.reach) & (rows < self.times.shape[1]), rows, -1)

    def cycle(self) -> Cycle | None:
        """Return the shortest cycle that the end times stored in `times` prove; None if they prove no cycle."""
        for periods in range(1, self.cycles + 1):
            apart = periods * self.stride
            seconds = self.times[0, 0, 0] - self.times[0, apart, 0]
            # Check the first pipeline stage before all stages, because its times alone rule out most cycle lengths.
            if all(self._grow(times, apart, seconds) for times in (self.times[:1], self.times)) and all(
                self._further_grow(stage, apart, seconds) for stage in {stage for stage, _ in self.further}
            ):
                value = float(seconds[0]) if len(seconds) == 1 else seconds
                begin = self.stop - periods * self.length
                return Cycle(periods * self.micro_batches, value, begin, self.stop)
        return None

    def _grow(self, times: Lanes, apart: int, seconds: Lanes) -> bool:
        """Return whether the latest passes and their messages end `seconds` after those `apart` rows on in `times`."""
        growth = times[:, : self.reach] - times[:, apart : apart + self.reach]
        return bool(np.all(abs(growth - seconds) <= TOLERANCE * seconds))

    def _further_grow(self, stage: int, apart: int, seconds: Lanes) -> bool:
        """Return whether a stage's unfinished collectives end `seconds` after those of the passes `apart` rows on."""
        for row in range(self.reach):
            new, old = (self.further.get((stage, at), []) for at in (row, row + apart))
            if len(new) != len(old):
                return False
            if not all(
                np.all(abs(a - b - seconds) <= TOLERANCE * seconds) for a, b in zip(new, old, strict=True)
            ):
                return False
        return True
