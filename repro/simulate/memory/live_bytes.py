"""Live bytes of a trace at every moment: their peak, its cause, pinned host memory, and a timeline for a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from repro.config.enums import ACCOUNTED, MODEL_STATES, Category
from repro.simulate.trace.events import Alloc, Event, Free, Mark, Operator, PhaseStart

if TYPE_CHECKING:
    from repro.simulate.trace.roles import Trace


class LiveBytes:
    """Live bytes after the recorded events: by category, and the total of the device."""

    def __init__(self) -> None:
        self.now: dict[str, int] = dict.fromkeys(ACCOUNTED, 0)
        self.most: dict[str, int] = dict.fromkeys(ACCOUNTED, 0)
        """Peak of each category."""
        self.total = 0
        """Live bytes of the device, without `Category.HOST`."""
        self._live: dict[int, tuple[Category, int]] = {}

    def see(self, event: Event) -> None:
        """Record the next event of a trace; events without an allocation or a release change nothing."""
        if type(event) is Alloc:
            self._live[event.id] = event.category, event.bytes
            self._add(event.category, event.bytes)
        elif type(event) is Free:
            category, size = self._live.pop(event.id)
            self._add(category, -size)
        elif type(event) is Mark:
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
class RoleMemory:
    """Live bytes of one role over initialisation and one step: of the device, unless a name begins with `host`."""

    peak_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """Live bytes at the peak."""
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTED, 0))
    """Peak of each category."""
    phase: str = ""
    """Phase of the peak."""
    line: str = ""
    """Source line whose allocation made the peak."""
    operator: str = ""
    """Operator that the source line called."""
    init_peak_bytes: int = 0
    host_reserved_bytes: int = 0
    """Page-locked bytes that the host allocator of a GPU machine reserves for `host_bytes`."""
    states: dict[str, int] = field(default_factory=dict)
    """Model states after the step, by category."""

    @property
    def states_bytes(self) -> int:
        """Bytes of model states."""
        return sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        """Peak of live bytes in host memory."""
        return self.most[Category.HOST]


def measure_live_bytes(events: Iterable[Event]) -> RoleMemory:
    """Return the live bytes of a trace."""
    found, live, pinned, phase = RoleMemory(), LiveBytes(), PinnedMemory(), ""
    peak: Alloc | None = None
    """The allocation of the highest total so far, while no other event has followed."""
    for event in chain(events, (PhaseStart("", -1),)):
        if type(event) is Operator:
            continue
        if type(event) is Alloc and event.category is not Category.HOST:
            live.see(event)
            if live.total > found.peak_bytes:
                found.peak_bytes, peak = live.total, event
            continue
        if peak is not None:
            found.by_category, found.phase = live.now.copy(), phase
            found.line, found.operator, peak = peak.line, peak.operator, None
        live.see(event)
        pinned.see(event)
        if type(event) is PhaseStart:
            if phase == "init":
                found.init_peak_bytes = found.peak_bytes
            phase = event.name
    found.most, found.host_reserved_bytes = live.most, pinned.reserved
    found.states = {category: live.now[category] for category in MODEL_STATES}
    return found


class PinnedMemory:
    """Allocator of page-locked host memory, which rounds sizes up to powers of two and reuses freed blocks."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes reserved after the recorded events."""
        self._size: dict[int, int] = {}
        self._free: Counter[int] = Counter()

    def see(self, event: Event) -> None:
        """Record the next event of a trace; events without host memory change nothing."""
        if type(event) is Alloc:
            if event.category is Category.HOST and event.bytes:
                size = 1 << (event.bytes - 1).bit_length()
                self._size[event.id] = size
                if self._free[size]:
                    self._free[size] -= 1
                else:
                    self.reserved += size
        elif self._size and type(event) is Free and event.id in self._size:
            self._free[self._size.pop(event.id)] += 1


TIMELINE_POINTS = 96
TIMELINE_RESOLUTION = 10_000
"""Parts of the device's peak to which a record rounds bytes."""


def live_bytes_over_step(traced: Trace, seconds: Callable[[Operator], float]) -> dict[str, Any]:
    """Return the live bytes in `TIMELINE_POINTS` equal parts of the device's busy time, at the fullest moment of each.

    `seconds` gives the time of an operator on the device; messages take no time here. The result has three keys. `unit`
    is in bytes. `bytes` holds units by category: one number if the category never changes, no entry if it is empty.
    `phases` holds the part in which each phase begins, its name and micro-batch, for the first phase of each part. The
    largest sum is the role's peak, unless the peak is in the initialisation.
    """
    step = traced.events[traced.step_start : traced.step_stop]
    took: dict[int, float] = {}
    """Seconds by operator. Layers share operators."""
    step_s = 0.0
    for event in step:
        if type(event) is Operator:
            if id(event) not in took:
                took[id(event)] = seconds(event)
            step_s += took[id(event)]
    live = LiveBytes()
    found: list[dict[str, int]] = []
    phases: dict[int, tuple[str, int]] = {}
    most, spent = -1, 0.0
    for event in traced.events[: traced.step_start]:
        live.see(event)
    for event in step:
        if type(event) is Operator:
            spent += took[id(event)]
            part = min(TIMELINE_POINTS - 1, int(spent / step_s * TIMELINE_POINTS)) if step_s else 0
            while len(found) <= part:
                found.append(live.now.copy())
                most = live.total
            continue
        if type(event) is PhaseStart:
            phases.setdefault(min(TIMELINE_POINTS - 1, len(found)), (event.name, event.micro_batch))
        live.see(event)
        if not found:
            found.append({})
        if live.total > most:  # the fullest moment of the part
            found[-1], most = live.now.copy(), live.total
    unit = max(1, max(sum(point.values()) - point[Category.HOST] for point in found) // TIMELINE_RESOLUTION)
    scaled = {
        category: [round(point[category] / unit) for point in found]
        for category in ACCOUNTED
        if any(point[category] for point in found)
    }
    return {
        "unit": unit,
        "bytes": {key: row[:1] if len(set(row)) == 1 else row for key, row in scaled.items()},
        "phases": [[part, name, micro_batch] for part, (name, micro_batch) in phases.items()],
    }
