"""What a trace says about memory: live bytes at every moment, their peak and what caused it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from repro.config.enums import ACCOUNTED, MODEL_STATES, Category
from repro.simulate.memory.pinned import PinnedMemory
from repro.simulate.trace.events import Alloc, Event, Free, Mark, PhaseStart


class LiveBytes:
    """What is live after the events seen so far: bytes by category, and of the device in all."""

    def __init__(self) -> None:
        self.now: dict[str, int] = dict.fromkeys(ACCOUNTED, 0)
        self.most: dict[str, int] = dict.fromkeys(ACCOUNTED, 0)
        """Of each category at any moment."""
        self.total = 0
        """Of the device: without `Category.HOST`."""
        self._live: dict[int, tuple[Category, int]] = {}

    def see(self, event: Event) -> None:
        """An event of a trace, in order; those that are not about memory pass by."""
        if isinstance(event, Alloc):
            self._live[event.id] = event.category, event.bytes
            self._add(event.category, event.bytes)
        elif isinstance(event, Free):
            category, size = self._live.pop(event.id)
            self._add(category, -size)
        elif isinstance(event, Mark):
            category, size = self._live[event.id]
            self._live[event.id] = event.category, size
            self._add(category, -size)
            self._add(event.category, size)

    def _add(self, category: Category, size: int) -> None:
        now = self.now[category] = self.now[category] + size
        if now > self.most[category]:
            self.most[category] = now
        if category is not Category.HOST:
            self.total += size


@dataclass
class Memory:
    """Live bytes of one role over initialisation and one step.  The device's, unless `host` says so."""

    peak_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """At the moment of the peak."""
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """The most of each category at any moment."""
    phase: str = ""
    """Of the peak."""
    line: str = ""
    """The line of the step's code whose allocation made the peak."""
    operator: str = ""
    """The operator that it called there."""
    init_peak_bytes: int = 0
    host_reserved_bytes: int = 0
    """Page-locked on a GPU's machine: what its allocator holds for `host_bytes`."""
    states: dict[str, int] = field(default_factory=dict)
    """Model states after the step, by category."""

    @property
    def states_bytes(self) -> int:
        """Bytes of model states."""
        return sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory."""
        return self.most[Category.HOST]


def measure(events: Iterable[Event]) -> Memory:
    """Go through a trace's allocations and releases."""
    found, live, pinned, phase = Memory(), LiveBytes(), PinnedMemory(), ""
    for event in events:
        live.see(event)
        pinned.see(event)
        if isinstance(event, Alloc):
            if live.total > found.peak_bytes:
                found.peak_bytes, found.by_category = live.total, dict(live.now)
                found.phase, found.line, found.operator = phase, event.line, event.operator
        elif isinstance(event, PhaseStart):
            if phase == "init":
                found.init_peak_bytes = found.peak_bytes
            phase = event.name
    found.most, found.host_reserved_bytes = live.most, pinned.reserved
    found.states = {category: live.now[category] for category in MODEL_STATES}
    return found
