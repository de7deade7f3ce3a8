"""Model of PyTorch's CUDA caching allocator (`c10/cuda/CUDACachingAllocator.cpp`), and the replay of a trace in it.

The sizes in `repro.simulate.memory.pools` hold from PyTorch's pull request 17120 (2019) to torch 2.13. Expandable
segments came with pull request 96995 (2023) and are off by default. Not modelled: several streams, CUDA graphs,
`max_split_size_mb`, garbage collection, rounding to powers of two, and the driver's choice of addresses."""

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
    """Memory request that the caching allocator cannot serve.

    No free block is large enough, and a new segment would exceed the limit even after the release of all empty ones.

    All attributes are in bytes. `free_in_blocks` is reserved but not allocated. `largest_free` is the size of the
    largest free block in the pool that serves the request.
    """

    requested: int
    allocated: int
    reserved: int
    free_in_blocks: int
    largest_free: int
    limit: int

    @property
    def by_fragmentation(self) -> bool:
        """Whether fragmentation causes an out-of-memory error: allocated bytes plus request are within the limit."""
        return self.allocated + round_up(self.requested) <= self.limit

    def __str__(self) -> str:
        return self.because_of(self.by_fragmentation)

    def because_of(self, fragmentation: bool) -> str:
        """Return the message of an out-of-memory error, which names fragmentation or the live tensors as the cause."""
        why = "fragmentation" if fragmentation else "the live tensors"
        return (
            f"out of memory by {why}: {self.requested} bytes requested, {self.allocated} allocated and "
            f"{self.reserved} reserved of {self.limit}; {self.free_in_blocks} are free in segments, "
            f"and the largest free block has {self.largest_free} bytes"
        )


class AllocatedRange(NamedTuple):
    """Block of an allocator's segment: address and size in bytes, and its allocation's `id` (None for a free block)."""

    address: int
    size: int
    id: int | None


class CachingAllocator:
    """Model of PyTorch's caching allocator on one device with one stream.

    `limit`: bytes that the allocator can reserve, which are the device's memory less the CUDA context and other memory
    outside the allocator; None: unlimited. `expandable`: whether PyTorch's option `expandable_segments:True` is set.
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        require(limit is None or limit >= 0, "limit", limit, "a number of bytes, 0 or more")
        self.device = DeviceMemory(limit)
        pool = ExpandablePool if expandable else Pool
        self._small, self._large = pool(self.device, small=True), pool(self.device, small=False)
        self._live: dict[int, tuple[Pool, MemoryBlock] | None] = {}
        self.allocated = self.peak_allocated = 0
        """Current and peak bytes of allocated blocks."""
        self.retries = 0
        """Number of requests before which the allocator released all empty segments (torch's `num_alloc_retries`)."""

    @property
    def reserved(self) -> int:
        """Bytes of all segments that the allocator has requested from the driver and not returned."""
        return self.device.reserved

    @property
    def peak_reserved(self) -> int:
        """Peak of reserved bytes, called "max cached" in Figure 7 of the ZeRO paper (1910.02054)."""
        return self.device.peak

    def malloc(self, id: int, size: int) -> None:
        """Allocate `size` bytes under the number `id` (no memory for 0 bytes). Raises `OutOfMemory`."""
        assert id not in self._live, f"the allocation {id} exists already"
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
        """Free the allocation with the number `id`. The allocator retains its memory as reserved memory."""
        place = self._live.pop(id)
        if place is not None:
            pool, block = place
            self.allocated -= block.size
            pool.give(block)

    def empty_cache(self) -> None:
        """Return every segment without a live block to the driver, as `torch.cuda.empty_cache` does."""
        self._large.release()
        self._small.release()

    def record(self, history: AllocationHistory, event: Alloc, phase: str) -> None:
        """Add segments' allocations and releases, and then the tensor allocation `event`, to the log `history`."""
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
        """Return each segment's blocks by address; a contiguous mapped range of an expandable segment is a segment."""
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
    """Result of the replay of a trace's allocations in the caching allocator's model; memory is in bytes."""

    peak_allocated: int
    peak_reserved: int
    retries: int
    """Number of requests before which the allocator released all empty segments."""
    phase: str
    """Phase of the step in which an allocation failed; without a failure, phase in which the reserved bytes peaked."""
    out_of_memory: OutOfMemory | None

    @property
    def fragmentation(self) -> float:
        """Fragmentation: share of the peak of reserved bytes that exceeds the peak of allocated bytes, 0 to 1."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0


def replay(
    events: Iterable[Event],
    limit: int | None = None,
    *,
    expandable: bool = False,
    history: AllocationHistory | None = None,
) -> Replay:
    """Replay the allocations of `events` in the caching allocator of an empty device, until the end or a failure.

    `limit`: maximum reserved bytes. `expandable`: use expandable segments. `history`: log of all allocations.
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
