"""Page-locked host memory as torch's allocator of it takes it: every piece a power of two, kept when it is freed.

`CachingHostAllocator` rounds up to the next power of two and hands a freed piece to the next that asks for its size, so
that what it holds only grows.  DeepSpeed's offloaded optimizer states come from it too.
"""

from __future__ import annotations

from collections import Counter

from repro.config.enums import Category
from repro.simulate.trace.events import Alloc, Event, Free


class PinnedMemory:
    """What the allocator holds after the events seen so far."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes."""
        self._size: dict[int, int] = {}
        self._free: Counter[int] = Counter()

    def see(self, event: Event) -> None:
        """An event of a trace, in order; those that are not about host memory pass by."""
        if isinstance(event, Alloc) and event.category is Category.HOST and event.bytes:
            size = 1 << (event.bytes - 1).bit_length()
            self._size[event.id] = size
            if self._free[size]:
                self._free[size] -= 1
            else:
                self.reserved += size
        elif isinstance(event, Free) and event.id in self._size:
            self._free[self._size.pop(event.id)] += 1
