"""What a trace says about memory: live bytes at every moment, their peak and what caused it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from repro.config.enums import ACCOUNTED, MODEL_STATES, Category
from repro.simulate.trace.events import Alloc, Event, Free, Mark, PhaseStart


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
    found = Memory()
    live: dict[int, Alloc] = {}
    now = dict.fromkeys(ACCOUNTED, 0)
    total, phase = 0, ""
    for event in events:
        if isinstance(event, Alloc):
            live[event.id] = event
            now[event.category] += event.bytes
            if now[event.category] > found.most[event.category]:
                found.most[event.category] = now[event.category]
            if event.category == Category.HOST:
                continue
            total += event.bytes
            if total > found.peak_bytes:
                found.peak_bytes, found.by_category = total, dict(now)
                found.phase, found.line, found.operator = phase, event.line, event.operator
        elif isinstance(event, Free):
            ended = live.pop(event.id)
            now[ended.category] -= ended.bytes
            if ended.category != Category.HOST:
                total -= ended.bytes
        elif isinstance(event, Mark):
            known = live[event.id]
            now[known.category] -= known.bytes
            now[event.category] += known.bytes
            found.most[event.category] = max(found.most[event.category], now[event.category])
            live[event.id] = known._replace(category=event.category)
        elif isinstance(event, PhaseStart):
            if phase == "init":
                found.init_peak_bytes = found.peak_bytes
            phase = event.name
    found.states = {category: now[category] for category in MODEL_STATES}
    return found
