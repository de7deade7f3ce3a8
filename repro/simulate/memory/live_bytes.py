"""Live bytes of a traced step at every moment: peak, cause of the peak, pinned host memory, and a record's timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.config.enums import ACCOUNTED, MODEL_STATES, Category
from repro.simulate.trace.events import Alloc, Event, Free, Mark, Operator, PhaseStart

if TYPE_CHECKING:
    from repro.simulate.trace.roles import Trace

COLUMNS = {category: column for column, category in enumerate(ACCOUNTED)}


class LiveBytes:
    """Live bytes of a trace after each change, as arrays whose first index is the number of preceding changes.

    An allocation or a release is one change. A new memory category of a storage counts as a release and an allocation.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.allocations: dict[int, Alloc] = {}
        """Allocation events; the key is the number of changes of live bytes up to and including the event."""
        self.phases: list[tuple[int, int, PhaseStart]] = []
        """Start of each phase: number of preceding changes of live bytes, number of preceding operators, and event."""
        self.operators: list[Operator] = []
        self.changes_before: list[int] = []
        """Number of changes of live bytes before each operator of the trace."""
        live: dict[int, tuple[int, int]] = {}
        changes = [(0, 0)]
        for event in events:
            if type(event) is Operator:
                self.operators.append(event)
                self.changes_before.append(len(changes) - 1)
            elif type(event) is Alloc:
                self.allocations[len(changes)] = event
                live[event.id] = change = COLUMNS[event.category], event.bytes
                changes.append(change)
            elif type(event) is Free:
                column, size = live.pop(event.id)
                changes.append((column, -size))
            elif type(event) is Mark:
                column, size = live[event.id]
                live[event.id] = change = COLUMNS[event.category], size
                changes += (column, -size), change
            elif type(event) is PhaseStart:
                self.phases.append((len(changes) - 1, len(self.operators), event))
        columns, sizes = np.array(changes, dtype=np.int64).T
        self.by_category = np.zeros((len(sizes), len(COLUMNS)), dtype=np.int64)
        """Live bytes of each category after each change, as an array [1 + changes, categories]."""
        self.by_category[np.arange(len(sizes)), columns] = sizes
        self.by_category.cumsum(axis=0, out=self.by_category)
        self.total = self.by_category.sum(axis=1) - self.by_category[:, COLUMNS[Category.HOST]]
        """Live bytes in device memory after each change, as an array [1 + changes]."""

    def after(self, changes: int) -> dict[str, int]:
        """Return the live bytes by memory category after the first `changes` allocations and releases; -1: all."""
        return dict(zip(COLUMNS, self.by_category[changes].tolist(), strict=True))

    @property
    def most(self) -> dict[str, int]:
        """Peak live bytes of each category over the trace."""
        return dict(zip(COLUMNS, self.by_category.max(axis=0).tolist(), strict=True))


@dataclass
class RoleMemory:
    """Live bytes of a rank of one pipeline role (stages with equal layers), in initialisation and one step. Names that
    begin with `host` refer to host memory, others to device memory."""

    live: LiveBytes = field(repr=False, compare=False)
    peak_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """Live bytes of each category at the moment when the total of all categories peaks."""
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """Peak live bytes of each category. Different categories may peak at different moments."""
    phase: str = ""
    """Phase of the step in which the live bytes reach their peak."""
    line: str = ""
    """Source line whose allocation reaches the peak of live bytes."""
    operator: str = ""
    """Operator that allocates at the peak of live bytes."""
    init_peak_bytes: int = 0
    host_reserved_bytes: int = 0
    """Bytes of page-locked memory that a GPU machine's host allocator reserves for the live bytes in host memory."""
    states: dict[str, int] = field(default_factory=dict)
    """Live bytes of each category of model states after the step."""

    @property
    def states_bytes(self) -> int:
        """Live bytes of all model states after the step."""
        return sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        """Peak of live bytes in host memory."""
        return self.most[Category.HOST]


def measure_live_bytes(events: Sequence[Event]) -> RoleMemory:
    """Return the peaks of a trace's live bytes by memory category, with phase, source line and operator of the peak."""
    live = LiveBytes(events)
    states = {category: size for category, size in live.after(-1).items() if category in MODEL_STATES}
    found = RoleMemory(live, most=live.most, states=states)
    if found.host_bytes:
        found.host_reserved_bytes = page_locked_bytes(events)
    on_device = [at for at, event in live.allocations.items() if event.category is not Category.HOST]
    totals = live.total[on_device]
    ends = [(changes, event.name) for changes, _, event in live.phases]
    for (_, name), (end, _) in pairwise([*ends, (len(live.total), "")]):
        if name == "init":
            found.init_peak_bytes = int(totals[: np.searchsorted(on_device, end, "right")].max(initial=0))
    if totals.any():
        peak = on_device[int(totals.argmax())]
        found.peak_bytes, found.by_category = int(totals.max()), live.after(peak)
        found.phase = next((name for before, name in reversed(ends) if before < peak), "")
        found.line, found.operator = live.allocations[peak].line, live.allocations[peak].operator
    return found


def page_locked_bytes(events: Sequence[Event]) -> int:
    """Return the bytes of page-locked host memory that an allocator reserves for the host storages of a trace."""
    reserved, size_of, free = 0, dict[int, int](), Counter[int]()
    for event in events:
        if isinstance(event, Alloc) and event.category is Category.HOST and event.bytes:
            size = size_of[event.id] = 1 << (event.bytes - 1).bit_length()
            if free[size]:
                free[size] -= 1
            else:
                reserved += size
        elif isinstance(event, Free) and event.id in size_of:
            free[size_of.pop(event.id)] += 1
    return reserved


TIMELINE_POINTS = 96
TIMELINE_RESOLUTION = 10_000
"""Number of units into which a record's memory timeline divides the peak of live bytes."""


def live_bytes_over_step(
    traced: Trace, live: LiveBytes, seconds: Callable[[Operator], float]
) -> dict[str, Any]:
    """Return the peak of live bytes in each of `TIMELINE_POINTS` equal parts of the step's operator time.

    `live`: live bytes of the trace. `seconds`: function that returns an operator's time on the device; messages take no
    time here. Keys of the result:

    - `unit`: bytes of a unit;
    - `bytes`: units of each category in each part; one number for a constant category, no entry for an empty one;
    - `phases`: [part, name, micro-batch] for the first phase that begins in a part.
    """
    step = traced.events[traced.step_start : traced.step_stop]
    before, within = (Counter(map(type, part)) for part in (traced.events[: traced.step_start], step))
    begin = before[Alloc] + before[Free] + 2 * before[Mark]
    end = begin + within[Alloc] + within[Free] + 2 * within[Mark]
    chosen = slice(before[Operator], before[Operator] + within[Operator])
    operators, changes_before = live.operators[chosen], live.changes_before[chosen]
    took = {key: seconds(operator) for key, operator in {id(one): one for one in operators}.items()}
    spent = np.cumsum([took[id(operator)] for operator in operators] or [0.0])
    share = spent / spent[-1] if spent[-1] else np.zeros_like(spent)
    parts = np.minimum(TIMELINE_POINTS - 1, (share * TIMELINE_POINTS).astype(int))
    firsts = np.searchsorted(parts, np.arange(1, parts[-1] + 1))
    bounds = [begin, *(changes_before[first] for first in firsts), end]
    fullest = [low + int(live.total[low : high + 1].argmax()) for low, high in pairwise(bounds)]
    unit = max(1, int(live.total[fullest].max()) // TIMELINE_RESOLUTION)
    rows = zip(COLUMNS, live.by_category[fullest].T, strict=True)
    scaled = {category: np.rint(row / unit).astype(int).tolist() for category, row in rows if row.any()}
    phases: dict[int, tuple[str, int]] = {}
    for number, (_, preceding, event) in enumerate(live.phases[before[PhaseStart] :][: within[PhaseStart]]):
        preceding -= before[Operator]
        part = int(parts[preceding - 1]) + 1 if preceding else int(number > 0 or event is not step[0])
        phases.setdefault(min(TIMELINE_POINTS - 1, part), (event.name, event.micro_batch))
    return {
        "unit": unit,
        "bytes": {key: row[:1] if len(set(row)) == 1 else row for key, row in scaled.items()},
        "phases": [[part, name, micro_batch] for part, (name, micro_batch) in phases.items()],
    }
