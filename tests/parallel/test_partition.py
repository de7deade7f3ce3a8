"""Tests of partitions: gather units, buckets, shards and groups of ranks, for any sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from repro.config import Layout
from repro.config.layout import ORDERS
from repro.parallel.mesh import groups, shape_only_mesh
from repro.parallel.zero.partition import (
    ALIGNMENT,
    GatherUnit,
    ModuleUse,
    default_units,
    parameters_by_unit,
    plan_bucket,
    plan_buckets,
)
from tests.wrap.edge_models import Containers


def test_blocks_are_the_outermost_modules_with_a_forward() -> None:
    names = [unit.name for unit in default_units(Containers())]
    assert names == [
        *(f"dictionaries.{i}.{key}" for i in range(2) for key in ("up", "down")),
        *(f"nested.{i}.{k}" for i in range(2) for k in range(2)),
        "holders.0.inner",
        "",
    ]


@pytest.mark.parametrize("name", ["dictionaries", "dictionaries.0", "nested.1", "holders.0", "scales.0"])
def test_containers_without_a_forward_are_refused_as_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks: '{name}': \w+ has no forward\. Name"):
        default_units(Containers(), [name])


def blocks(*names: str, inside: tuple[str, ...] = ()) -> list[GatherUnit]:
    """Return a unit for each name, and last the unit of the root with the modules `inside` it."""
    return [
        *(GatherUnit(name, (ModuleUse(name),)) for name in names),
        GatherUnit("", (ModuleUse(""), *map(ModuleUse, inside))),
    ]


def lists() -> nn.ModuleDict:
    """Return a model of two lists, which share a block, and a sequence. One list contains another list."""
    shared = nn.Linear(2, 2)
    inner = nn.ModuleList([nn.Linear(2, 2)])
    return nn.ModuleDict(
        {
            "first": nn.ModuleList([nn.Linear(2, 2), shared]),
            "second": nn.ModuleList([inner, shared, nn.Sequential(nn.Linear(2, 2))]),
            "head": nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
        }
    )


def test_blocks_are_elements_of_lists_or_else_of_sequences() -> None:
    assert default_units(lists()) == blocks("first.0", "first.1", "second.0.0", "second.2")
    assert default_units(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == blocks("0", "1")
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    assert default_units(nested) == blocks("0", "1"), "modules inside a block are not blocks"
    assert default_units(nn.Linear(2, 2)) == blocks()


def test_only_child_without_sibling_parameters_joins_its_parent() -> None:
    """For example, `generate` of a wrapper calls the wrapped model directly."""
    wrapper = nn.Sequential(nn.Sequential(nn.Bilinear(2, 2, 2)))
    assert default_units(wrapper, blocks=()) == blocks("0", inside=("0", "0.0"))
    scaled = nn.Sequential(nn.Linear(2, 2))
    scaled.scale = nn.Parameter()  # type: ignore[assignment]
    assert default_units(scaled) == blocks("0")
    assert default_units(nn.ModuleDict({"layers": nn.ModuleList([nn.Tanh()])})) == blocks("layers.0")


def test_named_blocks_must_be_submodules() -> None:
    assert default_units(lists(), ["head", "first.0"]) == blocks("head", "first.0")
    with pytest.raises(ValueError, match=r"'tail' is no submodule\. Use one of first, first\.0, .*\.\.\."):
        default_units(lists(), ["tail"])


def test_parameters_of_several_units_belong_to_the_root() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    module[1].weight = module[0].weight
    units = blocks("0", "1")

    def owned(units: list[GatherUnit]) -> list[list[str]]:
        return [[names[id(p)] for p in unit] for unit in parameters_by_unit(module, units)]

    assert owned(units) == [["0.bias"], ["1.bias"], ["0.weight", "2.weight"]]
    tied = GatherUnit("both", (ModuleUse("0"), ModuleUse("1")))
    assert owned([tied]) == [["0.weight", "0.bias", "1.bias"]]
    with pytest.raises(ValueError, match=r"blocks 0, 1 share a parameter\. Add a module"):
        owned(units[:2])


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
