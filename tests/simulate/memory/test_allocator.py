"""The allocator model: its rules by hand, and what a real device was seen to do."""

from __future__ import annotations

import pickle

import pytest

from repro.config import ConfigError
from repro.simulate.memory.allocator import CachingAllocator, OutOfMemory
from repro.simulate.memory.pools import LARGE_BUFFER, MIB, SMALL_BUFFER, SMALL_SIZE, segment_size


def filled(*sizes: int, **options: int | bool | None) -> CachingAllocator:
    """An allocator that holds `sizes` under the names 0, 1, ..."""
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    for id, size in enumerate(sizes):
        allocator.malloc(id, size)
    return allocator


def sizes(allocator: CachingAllocator) -> list[list[tuple[int, int | None]]]:
    return [[(block.size, block.id) for block in segment] for segment in allocator.segments()]


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, SMALL_BUFFER),
        (512, 512, SMALL_BUFFER),
        (513, 1024, SMALL_BUFFER),
        (SMALL_SIZE, SMALL_SIZE, SMALL_BUFFER),
        (SMALL_SIZE + 1, SMALL_SIZE + 512, LARGE_BUFFER),
        (10 * MIB - 512, 10 * MIB - 512, LARGE_BUFFER),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (1000 * MIB + 512, 1000 * MIB + 512, 1002 * MIB),
    ],
)
def test_rounding_and_segment_sizes(size: int, allocated: int, reserved: int) -> None:
    allocator = filled(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert size == 0 or segment_size(size) == reserved


def test_small_requests_share_a_segment_and_large_ones_split_twenty_mebibytes() -> None:
    assert sizes(filled(1000, SMALL_SIZE, 2000)) == [
        [(1024, 0), (SMALL_SIZE, 1), (2048, 2), (2 * MIB - SMALL_SIZE - 3072, None)],
    ]
    assert sizes(filled(6 * MIB, 6 * MIB, 6 * MIB)) == [
        [(6 * MIB, 0), (6 * MIB, 1), (6 * MIB, 2), (2 * MIB, None)],
    ]


def test_a_rest_of_one_mebibyte_stays_with_the_large_block_and_of_512_bytes_leaves_the_small_one() -> None:
    large = filled(20 * MIB)
    large.free(0)
    large.malloc(1, 19 * MIB)
    assert sizes(large) == [[(20 * MIB, 1)]]
    large.free(1)
    large.malloc(2, 19 * MIB - 512)
    assert sizes(large) == [[(19 * MIB - 512, 2), (MIB + 512, None)]]
    small = filled(SMALL_SIZE, SMALL_SIZE - 512)
    assert sizes(small) == [[(SMALL_SIZE, 0), (SMALL_SIZE - 512, 1), (512, None)]]


def test_the_smallest_free_block_that_fits_is_taken_and_the_lower_of_two_equal_ones() -> None:
    allocator = filled(30 * MIB, 14 * MIB, 22 * MIB, 14 * MIB)
    for id in range(4):
        allocator.free(id)
    allocator.malloc(4, 14 * MIB)
    allocator.malloc(5, 18 * MIB)
    assert [[id for _, id in segment] for segment in sizes(allocator)] == [[None], [4], [5, None], [None]]
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one_block(order: tuple[int, ...]) -> None:
    allocator = filled(4 * MIB, 4 * MIB, 4 * MIB)
    for id in order:
        allocator.free(id)
    assert sizes(allocator) == [[(LARGE_BUFFER, None)]]
    assert (allocator.allocated, allocator.reserved) == (0, LARGE_BUFFER)


def test_what_is_freed_is_used_again_before_the_driver_is_asked() -> None:
    allocator = CachingAllocator()
    for step in range(10):
        for id, size in enumerate((64 * MIB, 3 * MIB, 5000)):
            allocator.malloc(10 * step + id, size)
        for id in range(3):
            allocator.free(10 * step + id)
    assert allocator.reserved == allocator.peak_reserved == (64 + 20 + 2) * MIB
    assert allocator.peak_allocated == 67 * MIB + 5120


def test_empty_segments_are_given_back_when_the_limit_is_met() -> None:
    allocator = filled(30 * MIB, 30 * MIB, 4 * MIB, limit=80 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(3, 50 * MIB)
    assert (allocator.reserved, allocator.retries) == ((20 + 50) * MIB, 1)
    assert allocator.peak_reserved == 80 * MIB


def test_out_of_memory_by_the_live_tensors() -> None:
    allocator = filled(40 * MIB, limit=64 * MIB)
    with pytest.raises(OutOfMemory, match="by the live tensors: 31457280 bytes requested") as caught:
        allocator.malloc(1, 30 * MIB)
    assert not caught.value.by_fragmentation
    assert (allocator.retries, allocator.allocated) == (1, 40 * MIB)
    allocator.malloc(1, 24 * MIB)


def test_out_of_memory_by_fragmentation_which_an_expandable_segment_avoids() -> None:
    def use(allocator: CachingAllocator) -> None:
        allocator.malloc(0, 30 * MIB)
        allocator.free(0)
        for id, size in ((1, 10 * MIB), (2, 2 * MIB), (3, 18 * MIB)):
            allocator.malloc(id, size)
        allocator.free(1)
        allocator.free(3)
        allocator.malloc(4, 20 * MIB)

    with pytest.raises(OutOfMemory, match="by fragmentation") as caught:
        use(CachingAllocator(40 * MIB))
    error = caught.value
    assert error.by_fragmentation
    assert (error.requested, error.allocated, error.reserved) == (20 * MIB, 2 * MIB, 30 * MIB)
    assert (error.free_in_blocks, error.largest_free, error.limit) == (28 * MIB, 18 * MIB, 40 * MIB)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.by_fragmentation) == (str(error), True)
    use(CachingAllocator(40 * MIB, expandable=True))


def test_an_expandable_segment_grows_by_granules_where_the_request_then_fits() -> None:
    allocator = filled(6 * MIB, 16 * MIB, 100, expandable=True)
    assert allocator.reserved == (40 + 2) * MIB
    assert sizes(allocator) == [
        [(512, 2), (2 * MIB - 512, None)],
        [(6 * MIB, 0), (16 * MIB, 1), (18 * MIB, None)],
    ]
    allocator.malloc(3, 30 * MIB)  # 18 MiB are there
    assert allocator.reserved == (60 + 2) * MIB


def test_a_block_that_can_grow_is_taken_last() -> None:
    """Four MiB before the unmapped end are the tightest by size, and can grow: the twelve in the middle are taken."""
    allocator = filled(12 * MIB, 4 * MIB, expandable=True)
    allocator.free(0)
    allocator.malloc(2, 3 * MIB)
    assert sizes(allocator) == [[(3 * MIB, 2), (9 * MIB, None), (4 * MIB, 1), (4 * MIB, None)]]


def test_an_expandable_segment_gives_back_the_granules_inside_its_free_blocks() -> None:
    allocator = filled(10 * MIB, 70 * MIB, 10 * MIB, 50 * MIB, limit=160 * MIB, expandable=True)
    allocator.free(1)
    assert allocator.reserved == 140 * MIB
    allocator.malloc(4, 75 * MIB)  # more than is free: 60 of the 70 MiB are unmapped, 80 mapped at the end
    assert (allocator.reserved, allocator.retries) == (160 * MIB, 1)
    assert sizes(allocator) == [
        [(10 * MIB, 0), (10 * MIB, None)],
        [(10 * MIB, 2), (50 * MIB, 3), (75 * MIB, 4), (5 * MIB, None)],
    ]
    allocator.free(4)
    allocator.empty_cache()
    allocator.malloc(5, 12 * MIB)  # the lowest addresses first: 10 MiB are there, 20 are mapped behind them
    assert sizes(allocator)[0] == [(10 * MIB, 0), (12 * MIB, 5), (18 * MIB, None)]
    assert allocator.reserved == 100 * MIB


def test_a_wrong_limit_is_named() -> None:
    with pytest.raises(ConfigError, match="limit = -1: must be a number of bytes"):
        CachingAllocator(-1)


class TestPublishedMeasurement:
    """pytorch/pytorch issue 123548 and pull request 193400: torch 2.12 on a 16 GiB card.

    64 MiB stay; each cycle allocates 91 and 45.5 MiB, then 2 MiB that stay, and frees the first two.
    """

    def cycles(self, allocator: CachingAllocator, count: int) -> list[tuple[int, int]]:
        """MiB allocated and reserved after each cycle."""
        allocator.malloc(0, 64 * MIB)
        seen = []
        for cycle in range(count):
            first = 3 * cycle + 1
            for id, size in enumerate((91 * MIB, 91 * MIB // 2, 2 * MIB), first):
                allocator.malloc(id, size)
            allocator.free(first)
            allocator.free(first + 1)
            seen.append((allocator.allocated // MIB, allocator.reserved // MIB))
        return seen

    @pytest.mark.parametrize("options", [{}, {"expandable": True}])
    def test_with_and_without_expandable_segments_stays_below_500(self, options: dict[str, int]) -> None:
        assert max(reserved for _, reserved in self.cycles(CachingAllocator(**options), 121)) < 500


def test_by_fragmentation_up_to_the_last_byte_of_the_limit() -> None:
    """1000 bytes take 1024: with 3072 live they would fill 4096 exactly, and that would be room."""
    just, over = (OutOfMemory(1000, allocated, 4096, 0, 0, 4096) for allocated in (3072, 3073))
    assert just.by_fragmentation
    assert str(just).startswith("out of memory by fragmentation: 1000 bytes requested")
    assert not over.by_fragmentation
    assert str(over).startswith("out of memory by the live tensors: 1000 bytes requested")
