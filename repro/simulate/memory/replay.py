"""A trace's allocations, replayed through the allocator model: what the step would reserve, and where it would fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from repro.config.enums import Category
from repro.simulate.memory.allocator import CachingAllocator, OutOfMemory
from repro.simulate.trace.events import Alloc, Event, Free, PhaseStart


@dataclass(frozen=True)
class Replay:
    """What a device held.  Bytes; a moment is the index of an event, -1 where there was none."""

    peak_allocated: int
    peak_reserved: int
    retries: int
    """How often a request was met only after every empty segment was given back."""
    allocated_at: int
    """The moment at which most was allocated, the first if there are several ..."""
    reserved_at: int
    """... and at which most was reserved, both before a failure."""
    phase: str
    """The phase in which the replay ran out of memory, else that in which most was reserved."""
    out_of_memory: OutOfMemory | None
    failed_at: int
    """The moment that it could not get past."""

    @property
    def fragmentation(self) -> float:
        """Share of the peak of reserved bytes that the peak of allocated bytes leaves over, 0 to 1."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0


def replay(
    events: Iterable[Event],
    limit: int | None = None,
    *,
    expandable: bool = False,
    max_split: int | None = None,
) -> Replay:
    """Replay the allocations of `events` on an empty device, to the end or to the first that does not fit.

    `limit` is in bytes; the options are those of `CachingAllocator`.  What lies in host memory, and
    events that are not about memory, pass by.
    """
    allocator = CachingAllocator(limit, expandable=expandable, max_split=max_split)
    malloc, free = allocator.malloc, allocator.free
    host: set[int] = set()
    now = phase = ""
    allocated = reserved = 0
    allocated_at = reserved_at = failed_at = -1
    failure = None
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            if event.category == Category.HOST:
                host.add(event.id)
                continue
            try:
                malloc(event.id, event.bytes)
            except OutOfMemory as error:
                failure, failed_at, phase = error, index, now
                break
            if allocator.allocated > allocated:
                allocated, allocated_at = allocator.allocated, index
            if allocator.reserved > reserved:
                reserved, reserved_at, phase = allocator.reserved, index, now
        elif isinstance(event, Free):
            if event.id in host:
                host.remove(event.id)
            else:
                free(event.id)
        elif isinstance(event, PhaseStart):
            now = event.name
    return Replay(
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        retries=allocator.retries,
        allocated_at=allocated_at,
        reserved_at=reserved_at,
        phase=phase,
        out_of_memory=failure,
        failed_at=failed_at,
    )
