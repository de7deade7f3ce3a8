"""Blocks and pools of the caching allocator (`repro.simulate.memory.allocator`); sizes and addresses are in bytes.

The driver returns one segment per request. A linked list of blocks covers a segment, and adjacent free blocks merge."""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20

MIN_BLOCK_SIZE = 512
"""Granularity in bytes to which every request is rounded up (PyTorch's `kMinBlockSize`)."""
SMALL_SIZE = MIB
"""Largest request in bytes that the small pool serves (PyTorch's `kSmallSize`)."""
SMALL_BUFFER = 2 * MIB
"""Bytes of a segment of the small pool (PyTorch's `kSmallBuffer`)."""
LARGE_BUFFER = 20 * MIB
"""Bytes of a segment of the large pool for requests below `MIN_LARGE_ALLOC` (PyTorch's `kLargeBuffer`)."""
MIN_LARGE_ALLOC = 10 * MIB
"""Smallest request in bytes for which a new segment has the request's own size (PyTorch's `kMinLargeAlloc`)."""
ROUND_LARGE = 2 * MIB
"""Page size in bytes, to which segments for large requests are rounded up (PyTorch's `kRoundLarge`)."""
UNLIMITED = 2**62

LIVE, FREE, UNMAPPED = "live", "free", "unmapped"


def round_up(size: int, unit: int = MIN_BLOCK_SIZE) -> int:
    """Return `size`, rounded up to a multiple of `unit` bytes."""
    return -(-size // unit) * unit


def segment_size(size: int) -> int:
    """Return the bytes of a new segment for a rounded request of `size` bytes that fits no free block."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return round_up(size, ROUND_LARGE)


class DeviceMemory:
    """Device memory that the CUDA driver manages: `limit` bytes without fragmentation and without reused addresses."""

    def __init__(self, limit: int | None) -> None:
        self.limit = UNLIMITED if limit is None else limit
        self.reserved = self.peak = 0
        self.changes: list[tuple[str, int, int]] = []
        """Allocations and releases of segments: action (as in torch's memory snapshots), address and size in bytes."""
        self._end = 0

    def take(self, size: int) -> bool:
        """Reserve `size` bytes and return True, or reserve nothing and return False if the limit would be exceeded."""
        if self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        return True

    def give(self, block: MemoryBlock, action: str) -> None:
        """Return the memory of `block` to the driver, and record this change under the name `action`."""
        self.reserved -= block.size
        self.changes.append((action, block.address, block.size))

    def place(self, size: int) -> int:
        """Reserve `size` bytes of unused address space, and return the first address."""
        self._end += size
        return self._end - size


class MemoryBlock:
    """Contiguous part of a segment, linked to the preceding and the next block."""

    __slots__ = ("address", "next", "prev", "size", "state")

    def __init__(self, address: int, size: int, state: str = FREE) -> None:
        self.address, self.size, self.state = address, size, state
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def split(self, size: int) -> MemoryBlock:
        """Shrink this block to its first `size` bytes and return the rest as a new block in the same state."""
        rest = MemoryBlock(self.address + size, self.size - size, self.state)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.size, self.next = size, rest
        return rest

    def absorb(self) -> None:
        """Merge the next block of the segment into this block."""
        other = self.next
        assert other is not None
        self.size, self.next = self.size + other.size, other.next
        if self.next is not None:
            self.next.prev = self


class Pool:
    """Pool of the free blocks for small or for large requests, sorted by size and then by address."""

    def __init__(self, device: DeviceMemory, *, small: bool) -> None:
        self.device = device
        self.heads: dict[int, MemoryBlock] = {}
        """First block of every segment, by address of the segment."""
        self._free: list[tuple[int, int, MemoryBlock]] = []
        self._grows = False
        """Whether free blocks can grow into unmapped bytes after them. Requests prefer blocks that cannot grow."""
        self._least_rest = MIN_BLOCK_SIZE if small else SMALL_SIZE + 1

    def find(self, size: int) -> MemoryBlock | None:
        """Remove the best-fitting free block for `size` bytes and return it unsplit; None if no block fits."""
        free = self._free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self._grows:
            at = self._best(at)
        return free.pop(at)[2]

    def grow(self, size: int) -> MemoryBlock | None:
        """Return a block of at least `size` bytes in a new segment; None if the limit would be exceeded."""
        span = segment_size(size)
        if not self.device.take(span):
            return None
        block = MemoryBlock(self.device.place(span), span)
        self.device.changes.append(("segment_alloc", block.address, span))
        self.heads[block.address] = block
        return block

    def cut(self, block: MemoryBlock, size: int) -> None:
        """Mark `block` as live. The bytes beyond `size` become a free block if they reach the pool's minimum."""
        if block.size - size >= self._least_rest:
            self._insert(block.split(size))
        block.state = LIVE

    def give(self, block: MemoryBlock) -> None:
        """Free `block`, and merge it with adjacent free blocks."""
        before, after = block.prev, block.next
        if before is not None and before.state is FREE:
            self._remove(before)
            before.absorb()
            block = before
        if after is not None and after.state is FREE:
            self._remove(after)
            block.absorb()
        block.state = FREE
        insort(self._free, (block.size, block.address, block))

    def release(self) -> None:
        """Return every segment without a live block to the driver."""
        retained = []
        for entry in self._free:
            block = entry[2]
            if block.prev is None and block.next is None:
                self._drop(block)
            else:
                retained.append(entry)
        self._free = retained

    def largest(self) -> int:
        """Return the size in bytes of the pool's largest free block."""
        return self._free[-1][0] if self._free else 0

    def _best(self, at: int) -> int:
        """Return the index of the free block that fits a request best; the search begins at the index `at`."""
        free = self._free
        # A free block counts as larger by the unmapped bytes after it, so that requests take such a block last.
        while at + 1 < len(free) and _growable_bytes(free[at + 1][2]) < _growable_bytes(free[at][2]):
            at += 1
        return at

    def _drop(self, block: MemoryBlock) -> None:
        assert block.prev is block.next is None
        del self.heads[block.address]
        self.device.give(block, "segment_free")

    def _insert(self, block: MemoryBlock) -> None:
        block.state = FREE
        insort(self._free, (block.size, block.address, block))

    def _remove(self, block: MemoryBlock) -> None:
        at = bisect_left(self._free, (block.size, block.address))
        assert self._free[at][2] is block
        del self._free[at]


ADDRESS_SPACE = LARGE_BUFFER * 2**24
"""Bytes of address space of an expandable segment; small, because PyTorch's memory viewer rounds addresses above 2**53.
"""


class ExpandablePool(Pool):
    """`Pool` with a single expandable segment, to which the driver maps and unmaps granules of memory."""

    def __init__(self, device: DeviceMemory, *, small: bool) -> None:
        super().__init__(device, small=small)
        self._least_rest, self._grows = MIN_BLOCK_SIZE, True
        self._granule = SMALL_BUFFER if small else LARGE_BUFFER
        self._base = device.place(ADDRESS_SPACE)
        everything = MemoryBlock(self._base, ADDRESS_SPACE, UNMAPPED)
        self.heads[self._base] = everything
        self._unmapped = [(self._base, everything)]

    def grow(self, size: int) -> MemoryBlock | None:
        """Map missing granules, and return a block of at least `size` bytes; None if the limit would be exceeded.

        Granules that this call has mapped before it reaches the limit stay mapped.
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

    def _lowest(self, size: int) -> MemoryBlock:
        """Return the first block of the lowest contiguous range of free or unmapped blocks with `size` bytes."""
        for _, block in self._unmapped:
            before = block.prev
            first = before if before is not None and before.state is FREE else block
            free_bytes, last = 0, first
            while free_bytes < size and last.state is not LIVE:
                free_bytes += last.size
                if last.next is None:
                    break
                last = last.next
            if free_bytes >= size:
                return first
        raise AssertionError("the address space of the expandable segment is exhausted")

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Map the first `size` bytes of an unmapped block, rounded up to full granules, as free memory.

        Return False and map nothing if the limit would be exceeded.
        """
        span = round_up(size, self._granule)
        if not self.device.take(span):
            return False
        self.device.changes.append(("segment_map", block.address, span))
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
        self.device.give(block, "segment_unmap")
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


def _growable_bytes(block: MemoryBlock) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state is UNMAPPED else 0)
