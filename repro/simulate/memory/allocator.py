"""Model of PyTorch's CUDA caching allocator, and the replay of a trace's allocations through it.

Torch *allocates* the blocks in which live tensors lie. A block is a request rounded up to 512 bytes, and in the large
pool up to 1 MiB more that is too small to split off. Torch *reserves* segments from the driver. Torch retains empty
segments and splits them among requests of many sizes. A device is out of memory by fragmentation when the next segment
does not fit although enough bytes are free inside the segments.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`. The sizes (`repro.simulate.memory.pools`) hold from pull
request 17120 (early 2019) to torch 2.13, which includes torch 1.2 to 1.4 of the ZeRO and Turing-NLG work. Earlier
versions shared 1 MiB among small requests and rounded large ones to 128 KiB. Pull request 96995 (2023) added
`expandable`, which is off by default.

Not modelled: other streams (which delay the release of their blocks), pools of CUDA graphs, `max_split_size_mb`,
garbage collection and rounding to powers of two. The driver's addresses decide between free blocks of equal size; here
an older segment has lower addresses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from repro.config.enums import Category
from repro.config.errors import require
from repro.simulate.memory.pools import (
    LIVE,
    SMALL_SIZE,
    UNMAPPED,
    DeviceMemory,
    ExpandablePool,
    MemoryBlock,
    Pool,
    round_up,
)
from repro.simulate.trace.events import Alloc, Event, Free, Operator, PhaseStart

if TYPE_CHECKING:
    from repro.measure.memory import AllocationHistory


@dataclass(eq=False)
class OutOfMemory(Exception):
    """A request that fits no free block, and exceeds the limit after the release of every empty segment.

    Bytes: `requested`; `allocated` and `reserved` at that moment; `free_in_blocks`, reserved but not allocated;
    `largest_free`, the largest free block of the pool that serves the request; `limit`.
    """

    requested: int
    allocated: int
    reserved: int
    free_in_blocks: int
    largest_free: int
    limit: int

    @property
    def by_fragmentation(self) -> bool:
        """Whether the live tensors and the request are within the limit, so that only a contiguous block is missing."""
        return self.allocated + round_up(self.requested) <= self.limit

    def __str__(self) -> str:
        return self.because_of(self.by_fragmentation)

    def because_of(self, fragmentation: bool) -> str:
        """Return the sizes behind the failure and its cause: `fragmentation`, or the live tensors."""
        why = "fragmentation" if fragmentation else "the live tensors"
        return (
            f"out of memory by {why}: {self.requested} bytes requested, {self.allocated} allocated and "
            f"{self.reserved} reserved of {self.limit}; {self.free_in_blocks} free in segments, "
            f"{self.largest_free} in one block"
        )


class AllocatedRange(NamedTuple):
    """A block of a segment: address and size in bytes, and the `id` of the allocation (None: free)."""

    address: int
    size: int
    id: int | None


class CachingAllocator:
    """Caching allocator of one device and one stream.

    limit: bytes that the driver can give (None: unlimited), which is the device's memory less the CUDA context
        and other memory outside the allocator.
    expandable: `expandable_segments:True`.
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        require(limit is None or limit >= 0, "limit", limit, "bytes, 0 or more")
        self.device = DeviceMemory(limit)
        pool = ExpandablePool if expandable else Pool
        self._small, self._large = pool(self.device, small=True), pool(self.device, small=False)
        self._live: dict[int, tuple[Pool, MemoryBlock] | None] = {}
        self.allocated = self.peak_allocated = 0
        """Current and peak bytes of live blocks."""
        self.retries = 0
        """Number of releases of all empty segments for a request (torch's `num_alloc_retries`). Each release costs
        time."""

    @property
    def reserved(self) -> int:
        """Bytes that the driver has given and not received back."""
        return self.device.reserved

    @property
    def peak_reserved(self) -> int:
        """Peak of reserved bytes: Figure 7's "max cached" of 1910.02054."""
        return self.device.peak

    def malloc(self, id: int, size: int) -> None:
        """Allocate `size` bytes under `id`; 0 bytes take no memory. Raises `OutOfMemory`."""
        assert id not in self._live, f"{id} is live already"
        if size == 0:
            self._live[id] = None
            return
        size, requested = round_up(size), size
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.find(size) or self._grow(pool, size)
        if block is None:
            raise OutOfMemory(
                requested,
                self.allocated,
                self.reserved,
                self.reserved - self.allocated,
                pool.largest(),
                self.device.limit,
            )
        if block.size == size:
            block.state = LIVE
        else:
            pool.cut(block, size)
        self._live[id] = pool, block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, id: int) -> None:
        """Free the allocation of `id`; its memory stays reserved."""
        place = self._live.pop(id)
        if place is not None:
            pool, block = place
            self.allocated -= block.size
            pool.give(block)

    def empty_cache(self) -> None:
        """Give the driver every segment that holds no live block, as `torch.cuda.empty_cache`."""
        self._large.release()
        self._small.release()

    def record(self, history: AllocationHistory, event: Alloc, phase: str) -> None:
        """Add an allocation, and preceding changes of the reserved memory, to a history."""
        for action, address, size in self.device.changes:
            history.add(action, address, size)
        self.device.changes.clear()
        place = self._live.get(event.id)
        if place is not None:
            history.alloc(
                event.id, place[1].address, event.bytes, event.category, event.operator, event.line, phase
            )
        elif event.bytes:
            history.add("oom", 0, event.bytes, device_free=self.device.limit - self.reserved)

    def segments(self) -> list[list[AllocatedRange]]:
        """Return every segment as its blocks in order of address; an expandable segment gives each mapped stretch."""
        names = {place[1].address: id for id, place in self._live.items() if place is not None}
        found: list[list[AllocatedRange]] = []
        for pool in (self._small, self._large):
            for _, head in sorted(pool.heads.items()):
                found.append([])
                block: MemoryBlock | None = head
                while block is not None:
                    if block.state is UNMAPPED:
                        found.append([])
                    else:
                        name = names[block.address] if block.state is LIVE else None
                        found[-1].append(AllocatedRange(block.address, block.size, name))
                    block = block.next
        return [blocks for blocks in found if blocks]

    def _grow(self, pool: Pool, size: int) -> MemoryBlock | None:
        block = pool.grow(size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = pool.grow(size)
        return block


@dataclass(frozen=True)
class Replay:
    """Result of a replay, in bytes."""

    peak_allocated: int
    peak_reserved: int
    retries: int
    """Number of releases of all empty segments for a request."""
    phase: str
    """Phase of the failure, or of the peak of reserved bytes without a failure."""
    out_of_memory: OutOfMemory | None

    @property
    def fragmentation(self) -> float:
        """Share of the peak of reserved bytes that exceeds the peak of allocated bytes, 0 to 1."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0


def replay(
    events: Iterable[Event],
    limit: int | None = None,
    *,
    expandable: bool = False,
    history: AllocationHistory | None = None,
) -> Replay:
    """Replay the allocations of `events` on an empty device, to the end or to the first failure.

    `limit` is in bytes; the options are those of `CachingAllocator`. Host memory and events without memory are ignored.
    `history`: receives every allocation.
    """
    allocator = CachingAllocator(limit, expandable=expandable)
    malloc, free, device = allocator.malloc, allocator.free, allocator.device
    host: set[int] = set()
    now = phase = ""
    reserved = 0
    failure = None
    for event in events:
        if type(event) is Operator:
            continue
        if type(event) is Alloc:
            if event.category == Category.HOST:
                host.add(event.id)
                continue
            try:
                malloc(event.id, event.bytes)
            except OutOfMemory as error:
                failure, phase = error, now
            if history is not None:
                allocator.record(history, event, now)
            if failure is not None:
                break
            if device.reserved > reserved:
                reserved, phase = device.reserved, now
        elif type(event) is Free:
            if host and event.id in host:
                host.remove(event.id)
            else:
                free(event.id)
                if history is not None:
                    history.free(event.id)
        elif type(event) is PhaseStart:
            now = event.name
    if history is not None:
        history.segments = allocator.segments()
    return Replay(
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
        retries=allocator.retries,
        phase=phase,
        out_of_memory=failure,
    )
