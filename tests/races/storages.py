"""Happens-before order of the host and the streams (vector clocks), and races: accesses of memory without an order.

A stream runs its operations in the order in which the host launches them, and each operation starts after its launch.
Operations of different streams may run in any order, unless a wait orders them.

Two accesses of the same bytes, of which one writes, must have an order. An access must also precede the release of its
memory, since the caching allocator reuses released memory at once on the stream of its allocation. Accesses of other
streams must end before that stream releases the memory, or the allocator must wait for those streams (`used_by`,
torch's `record_stream`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
Moment = dict[str, int]
"""Vector clock: for each actor, the number of its last operation that has certainly ended."""


class Point(NamedTuple):
    """Operation of an actor (the host or a stream)."""

    actor: str
    number: int


class Order:
    """Vector clocks of all actors. An actor exists from the first use of its name."""

    def __init__(self) -> None:
        self._clocks: dict[str, Moment] = {HOST: {HOST: 0}}

    def _clock(self, actor: str) -> Moment:
        return self._clocks.setdefault(actor, {actor: 0})

    def run(self, actor: str) -> Point:
        """Add an operation of the actor after its earlier operations and waits; the host launches those of streams."""
        clock = self._clock(actor)
        if actor != HOST:
            self._clocks[HOST][HOST] += 1
            self.wait(actor, self._clocks[HOST])
        clock[actor] += 1
        return Point(actor, clock[actor])

    def record(self, actor: str) -> Moment:
        """Return the moment after all launched operations and waits of the actor, as a CUDA event."""
        self.run(actor)
        return dict(self._clock(actor))

    def wait(self, actor: str, moment: Moment) -> None:
        """Order later operations of the actor after `moment`."""
        clock = self._clock(actor)
        for other, number in moment.items():
            clock[other] = max(clock.get(other, 0), number)

    def has_ended(self, point: Point, actor: str) -> bool:
        """Return whether the operation `point` certainly ends before the next operation of the actor."""
        host = 0 if actor == HOST else self._clocks[HOST].get(point.actor, 0)
        return point.number <= max(self._clock(actor).get(point.actor, 0), host)


class Access(NamedTuple):
    """Read or write of bytes [first, last) of a storage by an operator or collective (`call`)."""

    point: Point
    first: int
    last: int
    writes: bool
    call: str

    def __str__(self) -> str:
        return f"{'writes' if self.writes else 'reads'} in {self.call} on {self.point.actor}"


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
        self.races: dict[str, None] = {}

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
                self._add_race(storage, old, new)
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
                    self._add_race(storage, old, f"released to {storage.stream} in {line}")
        storage.released, storage.accesses, storage.used_by = line, [], set()

    def restore(self, storage: Storage, stream: str) -> None:
        """Allocate new memory from the pool of the current stream."""
        storage.stream, storage.released = stream, ""

    def _add_race(self, storage: Storage, first: object, second: object) -> None:
        self.races[f"{storage.name}: {first}; {second}: without an order"] = None
