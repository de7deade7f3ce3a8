"""How flat buffers are cut: parameters into buckets, buckets into equal shards, shards into ranges.

Pure arithmetic on sizes.  A bucket is a run of parameters laid end to end and padded so that every one of
the `n` ranks owns an equal shard; shards do not respect the boundaries of parameters (1910.02054
sec. 5.1: "equal partitions").  Numbers are elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Tag = TypeVar("Tag")

ALIGNMENT = 8
"""Shards are multiples of this, so that a shard of 16-bit elements starts on a 16-byte boundary."""


@dataclass(frozen=True)
class ParameterSlot(Generic[Tag]):
    """One parameter's place in a bucket: elements `start` to `stop`."""

    index: int
    """The parameter's number among those that were planned."""
    start: int
    stop: int
    tag: Tag
    """Whatever must not be mixed when shards are processed (optimizer group, tp duplicate)."""


@dataclass(frozen=True)
class BucketPlan(Generic[Tag]):
    """Where each parameter of one bucket lies, and how the bucket is sharded over `n` ranks."""

    slots: tuple[ParameterSlot[Tag], ...]
    n: int

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def padded(self) -> int:
        """Elements with padding: the smallest multiple of `n * ALIGNMENT` that holds `numel`."""
        step = self.n * ALIGNMENT
        return -(-self.numel // step) * step

    @property
    def shard(self) -> int:
        """Elements of one shard."""
        return self.padded // self.n

    def ranges(self, rank: int) -> list[tuple[Tag, int, int]]:
        """The rank's shard as runs (tag, start, stop) relative to the shard; padding has no run."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        runs: list[tuple[Tag, int, int]] = []
        for slot in self.slots:
            start, stop = max(slot.start, low) - low, min(slot.stop, high) - low
            if start >= stop:
                continue
            if runs and runs[-1][0] == slot.tag and runs[-1][2] == start:
                runs[-1] = (slot.tag, runs[-1][1], stop)
            else:
                runs.append((slot.tag, start, stop))
        return runs

    def pieces(self, rank: int) -> list[tuple[int, int, int, int]]:
        """The rank's shard as (parameter index, first element, last element + 1, place in the shard)."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                found.append((slot.index, start - slot.start, stop - slot.start, start - low))
        return found


def plan_bucket(sizes: Iterable[tuple[int, int, Tag]], n: int) -> BucketPlan[Tag]:
    """One bucket of (parameter index, elements, tag), in the order given."""
    slots, start = [], 0
    for index, numel, tag in sizes:
        slots.append(ParameterSlot(index, start, start + numel, tag))
        start += numel
    return BucketPlan(tuple(slots), n)


def plan_buckets(sizes: Sequence[tuple[int, int, Tag]], n: int, bucket_numel: int) -> list[BucketPlan[Tag]]:
    """Buckets of at most `bucket_numel` elements, in the order given; a larger parameter gets its own."""
    plans: list[BucketPlan[Tag]] = []
    current: list[tuple[int, int, Tag]] = []
    filled = 0
    for entry in sizes:
        if current and filled + entry[1] > bucket_numel:
            plans.append(plan_bucket(current, n))
            current, filled = [], 0
        current.append(entry)
        filled += entry[1]
    if current:
        plans.append(plan_bucket(current, n))
    return plans
