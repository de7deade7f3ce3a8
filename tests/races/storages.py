"""Who reads and writes which bytes of which storage, and which of that nothing orders.

Two accesses of the same bytes, of which one writes, must not run at the same time.  Nor may an access run when the
memory has been released: the caching allocator gives it at once to whoever next asks on the stream that it was
allocated on, so what other streams do with it must be over for that stream, or be known to the allocator (`used_by`,
torch's `record_stream`), which then keeps the memory until they are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.races.order import Order, Point


class Access(NamedTuple):
    """Bytes [first, last) of a storage, read or written."""

    point: Point
    first: int
    last: int
    writes: bool
    what: str
    """Operator and line of the product."""

    def __str__(self) -> str:
        return f"{'writes' if self.writes else 'reads'} in {self.what} on {self.point.actor}"


class Race(NamedTuple):
    """Two accesses, or an access and a release, that nothing orders."""

    storage: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.storage}: {self.first}; {self.second}: nothing orders them"


@dataclass
class Storage:
    """One allocation."""

    name: str
    stream: str
    """Whose pool it came from."""
    pinned: bool = False
    """Page-locked host memory, which its allocator does not give away before the copies are over."""
    accesses: list[Access] = field(default_factory=list)
    used_by: set[str] = field(default_factory=set)
    """Streams that the allocator has been told of."""
    released: str = ""
    """Where, if it has been."""


class Storages:
    """All of them, and the races that were found."""

    def __init__(self, order: Order):
        self.order = order
        self.races: dict[Race, None] = {}

    def access(self, storage: Storage, actor: str, first: int, last: int, *, writes: bool, what: str) -> None:
        """The actor reads or writes bytes [first, last)."""
        if first >= last:
            return
        if storage.released:
            self._found(storage, f"released in {storage.released}", f"used in {what} on {actor}")
        new = Access(self.order.does(actor), first, last, writes, what)
        kept = []
        for old in storage.accesses:
            apart = old.last <= first or last <= old.first
            over = self.order.is_over(old.point, actor)
            if not apart and not over and (writes or old.writes):
                self._found(storage, str(old), str(new))
            # Who is ordered after the new access is after the old one too, and meets the new one if the old.
            inside = first <= old.first and old.last <= last
            if not (over and inside and (writes or not old.writes)):
                kept.append(old)
        storage.accesses = [*kept, new]

    def release(self, storage: Storage, what: str) -> None:
        """The memory goes back to the pool of its stream."""
        if not storage.pinned:
            for old in storage.accesses:
                actor = old.point.actor
                if actor not in storage.used_by and not self.order.is_over(old.point, storage.stream):
                    self._found(storage, str(old), f"released to {storage.stream} in {what}")
        storage.released, storage.accesses, storage.used_by = what, [], set()

    def restore(self, storage: Storage, stream: str) -> None:
        """It gets other memory, from the pool of the stream that is current."""
        storage.stream, storage.released = stream, ""

    def _found(self, storage: Storage, first: str, second: str) -> None:
        self.races[Race(storage.name, first, second)] = None
