"""Property tests of the allocator model: random allocations and releases, in any order and with any option."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from repro.simulate.memory.allocator import CachingAllocator, OutOfMemory, replay
from repro.simulate.memory.pools import (
    LARGE_BUFFER,
    MIB,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    round_up,
)
from repro.simulate.trace.events import Alloc, Event, Free

BOUNDARIES = [512, SMALL_SIZE, SMALL_SIZE + 1, MIN_LARGE_ALLOC - 512, MIN_LARGE_ALLOC, LARGE_BUFFER]
SIZES = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([*BOUNDARIES, 2 * MIB, 48 * MIB]),
    st.integers(1, SMALL_SIZE),
    st.integers(SMALL_SIZE, 3 * MIN_LARGE_ALLOC),
    st.integers(1, 96 * MIB),
)


class Allocations(RuleBasedStateMachine):
    """Random requests and releases on devices without a limit and on devices that are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.count = 0

    @initialize(expandable=st.booleans(), limit=st.sampled_from([None, 64 * MIB, 301 * MIB]))
    def start(self, expandable: bool, limit: int | None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocator = CachingAllocator(limit, expandable=expandable)

    @rule(size=SIZES)
    def malloc(self, size: int) -> None:
        self.count += 1
        before = self.allocator.allocated
        try:
            self.allocator.malloc(self.count, size)
            self.live[self.count] = size
        except OutOfMemory as error:
            self.check_failure(error, before)

    def check_failure(self, failed: OutOfMemory, before: int) -> None:
        assert self.limit is not None
        assert self.allocator.allocated == before == failed.allocated
        assert failed.reserved == self.allocator.reserved
        assert failed.largest_free <= failed.free_in_blocks == failed.reserved - before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[id]
        self.allocator.free(id)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        if not self.expandable:
            assert all(any(b.id is not None for b in s) for s in self.allocator.segments())

    @precondition(lambda self: self.live)
    @rule()
    def free_everything(self) -> None:
        for id in self.live:
            self.allocator.free(id)
        self.live.clear()
        assert self.allocator.allocated == 0
        assert all(len(blocks) == 1 for blocks in self.allocator.segments())
        self.allocator.empty_cache()
        assert self.allocator.reserved == 0

    @invariant()
    def blocks_tile_their_segments(self) -> None:
        segments = self.allocator.segments()
        for blocks in segments:
            assert all(a.address + a.size == b.address for a, b in pairwise(blocks))
            assert all(a.id is not None or b.id is not None for a, b in pairwise(blocks))
        spans = sorted((blocks[0].address, blocks[-1].address + blocks[-1].size) for blocks in segments)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        blocks = [block for blocks in segments for block in blocks]
        sizes = {block.id: block.size for block in blocks if block.id is not None}
        assert sizes.keys() == {id for id, size in self.live.items() if size}
        for id, size in sizes.items():
            excess = size - round_up(self.live[id])
            assert 0 <= excess <= (0 if self.live[id] <= SMALL_SIZE or self.expandable else MIB)
        assert self.allocator.allocated == sum(sizes.values())
        assert self.allocator.reserved == sum(block.size for block in blocks)

    @invariant()
    def segment_sizes_are_those_of_the_driver(self) -> None:
        for blocks in self.allocator.segments():
            span = sum(block.size for block in blocks)
            assert span % ROUND_LARGE == 0
            if not self.expandable:
                assert span == SMALL_BUFFER or span >= MIN_LARGE_ALLOC
                small = [self.live[block.id] <= SMALL_SIZE for block in blocks if block.id is not None]
                assert all(is_small == (span == SMALL_BUFFER) for is_small in small)

    @invariant()
    def bytes_are_within_bounds(self) -> None:
        allocator = self.allocator
        assert sum(map(round_up, self.live.values())) <= allocator.allocated <= allocator.reserved
        assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved
        assert allocator.reserved <= allocator.peak_reserved
        assert self.limit is None or allocator.peak_reserved <= self.limit


Allocations.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAllocations = Allocations.TestCase


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Draw allocations and releases; each release follows its allocation."""
    events: list[Event] = []
    live: list[int] = []
    for id, size in enumerate(draw(st.lists(SIZES, min_size=1, max_size=40))):
        while live and draw(st.booleans()):
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
        events.append(Alloc(id, size, "activations", "", ""))
        live.append(id)
    return events


@settings(max_examples=100)
@given(events=traces(), expandable=st.booleans())
def test_a_limit_has_an_effect_only_below_the_peak(events: list[Event], expandable: bool) -> None:
    unlimited = replay(events, expandable=expandable)
    assert unlimited.retries == 0
    assert replay(events, unlimited.peak_reserved, expandable=expandable) == unlimited
    sizes = {event.id: round_up(event.bytes) for event in events if isinstance(event, Alloc)}
    changes = [sizes[event.id] * (1 if isinstance(event, Alloc) else -1) for event in events]
    if needed := max(accumulate(changes)):
        limited = replay(events, needed - 1, expandable=expandable)
        assert limited.out_of_memory is not None
        assert limited.retries >= 1
        assert limited.peak_reserved < needed


@settings(max_examples=60)
@given(requests=st.lists(SIZES, max_size=40))
def test_expandable_segments_waste_less_than_one_granule_per_pool(requests: list[int]) -> None:
    """Without releases, expandable segments exceed plain segments by less than one granule per pool."""
    events = [Alloc(id, size, "parameters", "", "") for id, size in enumerate(requests)]
    small = sum(round_up(size) for size in requests if size <= SMALL_SIZE)
    large = sum(round_up(size) for size in requests if size > SMALL_SIZE)
    grown = replay(events, expandable=True).peak_reserved
    assert grown == round_up(small, SMALL_BUFFER) + round_up(large, LARGE_BUFFER)
    assert grown < replay(events).peak_reserved + SMALL_BUFFER + LARGE_BUFFER
