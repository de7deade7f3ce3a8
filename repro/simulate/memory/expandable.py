"""The pool of `expandable_segments:True`: one segment that grows, instead of a segment for each request.

Physical memory is mapped into reserved addresses in granules, 2 MiB in the small pool and 20 MiB in the large
one, at the lowest address where the request then fits: normally the end.  Under pressure the whole granules
inside free blocks are unmapped, so that what is free between live blocks is not lost.  The address space is
not bounded here; torch reserves 9/8 of the device's memory and begins a second segment where that is full,
which changes addresses but not how much is mapped.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from repro.simulate.memory.pools import (
    FREE,
    LARGE_SEGMENT,
    LIVE,
    ROUND,
    SMALL_SEGMENT,
    UNLIMITED,
    UNMAPPED,
    DeviceMemory,
    MemoryBlock,
    Pool,
    round_up,
)

ADDRESS_SPACE = LARGE_SEGMENT * 2**40


class ExpandablePool(Pool):
    """A `Pool` whose only segment is mapped granule by granule."""

    def __init__(self, device: DeviceMemory, *, small: bool, max_split: int = UNLIMITED) -> None:
        super().__init__(device, small=small, max_split=max_split)
        self._least_rest, self._cut_below = ROUND, UNLIMITED
        self._granule = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._base = device.place(ADDRESS_SPACE)
        everything = MemoryBlock(self._base, ADDRESS_SPACE, UNMAPPED)
        self.heads[self._base] = everything
        self._unmapped = [(self._base, everything)]

    def grow(self, size: int) -> MemoryBlock | None:
        """A block of at least `size`, mapped where it is missing; None where the limit is in the way.

        What was mapped before the limit was met stays mapped.
        """
        block = self._lowest(size)
        if block.state is UNMAPPED and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
        self._remove(block)
        return block

    def release(self) -> None:
        """Unmap every granule that lies inside a free block."""
        for _, _, block in list(self._free):
            self._unmap(block)

    def release_oversize(self, size: int) -> bool:
        """Nothing: no part of a segment that grows is a segment of its own."""
        return False

    def _best(self, at: int) -> int:
        # The block before the unmapped end counts with all that it can grow by, so that it is taken last.
        free = self._free
        while at + 1 < len(free) and _room(free[at + 1][2]) < _room(free[at][2]):
            at += 1
        return at

    def _lowest(self, size: int) -> MemoryBlock:
        """The first of the lowest blocks, free or unmapped, that have room for `size` together."""
        for _, block in self._unmapped:
            before = block.prev
            first = before if before is not None and before.state is FREE else block
            room, last = 0, first
            while room < size and last.state is not LIVE:
                room += last.size
                if last.next is None:
                    break
                last = last.next
            if room >= size:
                return first
        raise AssertionError("the address space has no end")

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Back the first `size` bytes of an unmapped block, in whole granules, and add them to the free ones."""
        span = round_up(size, self._granule)
        if not self.device.take(span):
            return False
        at = bisect_left(self._unmapped, (block.address,))
        del self._unmapped[at]
        if span < block.size:
            rest = block.split(span)
            self._unmapped.insert(at, (rest.address, rest))
        self.give(block)
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        stop = block.address + block.size
        begin = self._base + round_up(block.address - self._base, self._granule)
        end = stop - (stop - self._base) % self._granule
        if begin >= end:
            return
        self._remove(block)
        if begin > block.address:
            inside = block.split(begin - block.address)
            self._insert(block)
            block = inside
        if end < stop:
            self._insert(block.split(end - begin))
        self.device.give(block.size)
        self._join_unmapped(block)

    def _join_unmapped(self, block: MemoryBlock) -> None:
        block.state = UNMAPPED
        before, after = block.prev, block.next
        if after is not None and after.state is UNMAPPED:
            del self._unmapped[bisect_left(self._unmapped, (after.address,))]
            block.absorb()
        if before is not None and before.state is UNMAPPED:
            before.absorb()
        else:
            insort(self._unmapped, (block.address, block))


def _room(block: MemoryBlock) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state is UNMAPPED else 0)
