"""Accesses of streams to the bytes of storages, and races: accesses without an order.

Two accesses of the same bytes, of which one writes, must have an order. An access must also precede the release of its
memory, since the caching allocator reuses released memory at once on the stream of its allocation. Accesses of other
streams must end before that stream releases the memory, or the allocator must wait for those streams (`used_by`,
torch's `record_stream`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.races.order import Order, Point


class Access(NamedTuple):
    """Read or write of bytes [first, last) of a storage."""

    point: Point
    first: int
    last: int
    writes: bool
    call: str
    """Operator or collective, and its source line."""

    def __str__(self) -> str:
        return f"{'writes' if self.writes else 'reads'} in {self.call} on {self.point.actor}"


class Race(NamedTuple):
    """Two accesses, or an access and a release, without an order."""

    storage: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.storage}: {self.first}; {self.second}: without an order"


@dataclass
class Storage:
    """One allocation."""

    name: str
    stream: str
    """Stream from whose memory pool the storage was allocated."""
    pinned: bool = False
    """Whether this is page-locked host memory, which its allocator reuses only after all copies."""
    accesses: list[Access] = field(default_factory=list)
    used_by: set[str] = field(default_factory=set)
    """Streams that `record_stream` has reported to the allocator."""
    released: str = ""
    """Source line of the release; empty before it."""


class Storages:
    """Accesses to all storages, and the races between them."""

    def __init__(self, order: Order):
        self.order = order
        self.races: dict[Race, None] = {}

    def access(self, storage: Storage, actor: str, first: int, last: int, *, writes: bool, call: str) -> None:
        """Record that the actor reads or writes bytes [first, last)."""
        if first >= last:
            return
        if storage.released:
            self._add_race(storage, f"released in {storage.released}", f"used in {call} on {actor}")
        new = Access(self.order.run(actor), first, last, writes, call)
        retained = []
        for old in storage.accesses:
            is_disjoint = old.last <= first or last <= old.first
            has_ended = self.order.has_ended(old.point, actor)
            if not is_disjoint and not has_ended and (writes or old.writes):
                self._add_race(storage, str(old), str(new))
            # A later access that races with the old access then also races with the new one.
            is_covered = first <= old.first and old.last <= last
            if not (has_ended and is_covered and (writes or not old.writes)):
                retained.append(old)
        storage.accesses = [*retained, new]

    def release(self, storage: Storage, line: str) -> None:
        """Return the memory to the pool of its stream."""
        if not storage.pinned:
            for old in storage.accesses:
                actor = old.point.actor
                if actor not in storage.used_by and not self.order.has_ended(old.point, storage.stream):
                    self._add_race(storage, str(old), f"released to {storage.stream} in {line}")
        storage.released, storage.accesses, storage.used_by = line, [], set()

    def restore(self, storage: Storage, stream: str) -> None:
        """Allocate new memory from the pool of the current stream."""
        storage.stream, storage.released = stream, ""

    def _add_race(self, storage: Storage, first: str, second: str) -> None:
        self.races[Race(storage.name, first, second)] = None
