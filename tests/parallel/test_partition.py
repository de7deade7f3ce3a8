"""Tests of the arithmetic of buckets, shards and groups of ranks, for any sizes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from repro.config import Layout
from repro.config.layout import ORDERS
from repro.parallel.mesh import groups, shape_only_mesh
from repro.parallel.zero.partition import ALIGNMENT, plan_bucket, plan_buckets

Entries = list[tuple[int, str]]
"""Size and tag of each parameter."""
sizes = st.lists(st.tuples(st.integers(1, 200), st.sampled_from("ab")), min_size=1, max_size=12)
ranks = st.integers(1, 9)


@given(sizes, ranks, st.integers(1, 400))
def test_buckets_contain_all_parameters_undivided_and_in_order(entries: Entries, n: int, limit: int) -> None:
    plans = plan_buckets([(i, size, tag) for i, (size, tag) in enumerate(entries)], n, limit)
    slots = [slot for plan in plans for slot in plan.slots]
    assert [slot.index for slot in slots] == list(range(len(entries)))
    assert [slot.stop - slot.start for slot in slots] == [size for size, _ in entries]
    for plan in plans:
        assert plan.numel <= limit or len(plan.slots) == 1
        assert plan.slots[0].start == 0
        assert all(a.stop == b.start for a, b in zip(plan.slots, plan.slots[1:], strict=False))


@given(sizes, ranks)
def test_equal_shards_cover_every_element_once(entries: Entries, n: int) -> None:
    """The pieces of all ranks contain all parameters, and each element is in the range of its tag.

    Shards are aligned with minimal padding. The optimizer makes one call per range, so adjacent ranges of equal tags
    are merged.
    """
    plan = plan_bucket([(i, size, tag) for i, (size, tag) in enumerate(entries)], n)
    assert plan.shard * n == plan.padded
    assert plan.shard % ALIGNMENT == 0
    assert 0 <= plan.padded - plan.numel < n * ALIGNMENT
    owner = [(slot.index, e) for slot in plan.slots for e in range(slot.stop - slot.start)]
    flat: list[tuple[int, int] | None] = [None] * plan.padded
    tags: list[str | None] = [None] * plan.padded
    for rank in range(n):
        base = rank * plan.shard
        for index, start, stop, offset in plan.pieces(rank):
            for k in range(stop - start):
                assert flat[base + offset + k] is None
                flat[base + offset + k] = (index, start + k)
        assert all(a[0] != b[0] for a, b in itertools.pairwise(plan.ranges(rank)))
        for tag, start, stop in plan.ranges(rank):
            for k in range(start, stop):
                assert tags[base + k] is None
                tags[base + k] = tag
    assert flat[: plan.numel] == owner
    assert all(element is None for element in flat[plan.numel :])
    assert tags[: plan.numel] == [entries[index][1] for index, _ in owner]
    assert all(tag is None for tag in tags[plan.numel :])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(ORDERS))
def test_groups_of_different_axes_share_one_rank(dp: int, tp: int, pp: int, order: str) -> None:
    """Every rank is in one group of each axis. Groups along the first axis have consecutive ranks."""
    layout = Layout(dp=dp, tp=tp, pp=pp, order=order)
    everyone = list(range(layout.world))
    for axis in ("dp", "tp", "pp"):
        assert sorted(r for group in groups(layout, axis) for r in group) == everyone
    inner, middle, _ = order.split("-")
    for rank in everyone:
        mesh = shape_only_mesh(layout, rank)
        for axis in ("dp", "tp", "pp"):
            assert layout.index_of(axis, rank) == getattr(mesh, axis).ranks.index(rank)
        first = getattr(mesh, inner).ranks
        assert first == tuple(range(rank - rank % len(first), rank - rank % len(first) + len(first)))
        assert getattr(mesh, middle).ranks[-1] - rank < len(first) * getattr(mesh, middle).size
        for one, other in itertools.combinations((mesh.dp, mesh.tp, mesh.pp), 2):
            assert set(one.ranks) & set(other.ranks) == {rank}
        if pp > 1 and mesh.pp.rank in (0, pp - 1):
            assert mesh.embedding.ranks == (mesh.pp.ranks[0], mesh.pp.ranks[-1])
        else:
            assert mesh.embedding.ranks == (rank,)


def test_ranks_are_numbered_as_in_megatron_lm() -> None:
    """The axes from inner to outer are tp, cp, dp and pp. The dp group contains dp x cp ranks, ordered by replica."""
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    assert layout.world == 16
    assert [layout.group_of(axis, 5) for axis in ("tp", "cp", "dp", "pp")] == [
        *((4, 5), (5, 7), (1, 3, 5, 7), (5, 13))
    ]
    llama = Layout(tp=2, cp=2, dp=2, pp=2, order="tp-pp-dp")
    assert (llama.group_of("pp", 5), llama.group_of("dp", 5)) == ((1, 5), (5, 7, 13, 15))
    assert llama.index_of("dp", 9) == 1
    assert groups(Layout(tp=2, dp=2, pp=2), "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
