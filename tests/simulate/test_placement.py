"""Tests of the node of each rank and the link class of each group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, Layout
from repro.config.layout import ORDERS
from repro.config.system import Quantity, System
from repro.config.systems import load_system_file
from repro.parallel import mesh
from repro.simulate.placement import GROUPS, Placement, group_members
from repro.simulate.time.interconnect import GroupsOnNodes


def placement_on(system: str | System, **layout: Any) -> Placement:
    return Placement(Layout(**layout), load_system_file(system) if isinstance(system, str) else system)


def test_groups_on_nodes_list_the_members_on_each_node() -> None:
    placement = placement_on("dgx2", tp=4, dp=64)
    groups = group_members(placement.layout, "dp")
    on_nodes = GroupsOnNodes(groups, placement.nodes(groups))
    assert set(on_nodes.ranks) == {4}
    assert set(on_nodes.nodes) == {16}
    (entry,) = np.flatnonzero((on_nodes.group == 1) & (on_nodes.node == 1))
    assert on_nodes.members_of(entry) == [17, 21, 25, 29]


def test_ranks_on_one_cpu_use_its_memory_links() -> None:
    selene = load_system_file("selene")
    placement = placement_on(replace(selene, links={"memory": selene.links["nvlink"]}), tp=2, dp=16)
    assert set(placement.links(0).values()) == {"memory"}
    assert placement.node_of(31) == 0


def test_unknown_devices_per_node_is_an_error_for_groups() -> None:
    system = replace(load_system_file("dgx2"), devices_per_node=Quantity(value=None, source="nobody says"))
    assert placement_on(system).node_of(0) == 0
    assert placement_on(system).links(0) == {}
    with pytest.raises(ConfigError) as caught:
        placement_on(system, tp=2).links(0)
    message = "dgx2: devices_per_node = 'unknown': this command needs a known value; source: nobody says"
    assert str(caught.value) == message


def test_a_group_inside_a_node_needs_intra_node_links() -> None:
    system = load_system_file("dgx2")
    bare = replace(system, links={"inter-node": system.links["inter-node"]})
    assert placement_on(bare, dp=32).links(0)["dp"] == "inter-node"
    with pytest.raises(ConfigError) as caught:
        placement_on(bare, tp=16).links(0)
    assert str(caught.value) == (
        "dgx2: links = ['inter-node']: must be one of memory, nvlink, pcie, "
        "because all ranks of the world group (0, 1, 2, ...) are on one node"
    )


degrees = st.sampled_from((1, 2, 3, 4))


@given(
    tp=degrees,
    dp=degrees,
    pp=degrees,
    cp=degrees,
    order=st.sampled_from(ORDERS),
    node=st.sampled_from([("dgx1-v100-16gb", 8, "nvlink"), ("lowbw-v100", 4, "pcie")]),
    data=st.data(),
)
def test_placement_groups_equal_the_groups_of_the_mesh(
    tp: int, dp: int, pp: int, cp: int, order: str, node: tuple[str, int, str], data: st.DataObject
) -> None:
    system, devices, inside = node
    placement = placement_on(system, tp=tp, dp=dp, pp=pp, cp=cp, order=order)
    layout = placement.layout
    rank = data.draw(st.integers(0, layout.world - 1))
    rank_mesh, links = mesh.shape_only_mesh(layout, rank), placement.links(rank)
    for group in GROUPS:
        groups = {placement.ranks_of(group, r) for r in range(layout.world)}
        assert {tuple(ranks) for ranks in group_members(layout, group).tolist()} == {
            g for g in groups if len(g) > 1
        }
        ranks = getattr(rank_mesh, group).ranks
        assert placement.ranks_of(group, rank) == ranks
        nodes = {r // devices for r in ranks}
        expected = "" if len(ranks) == 1 else inside if len(nodes) == 1 else "inter-node"
        assert links.get(group, "") == expected
        assert placement.link_of(group, ranks) == placement.link_of(group, ranks[::-1]) == expected
    assert layout.index_of("pp", rank) == rank_mesh.pp.rank
