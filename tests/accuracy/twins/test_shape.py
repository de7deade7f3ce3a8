"""Tests of the placement of a layout on fewer ranks."""

from __future__ import annotations

import pytest

from repro.accuracy.twins.scaling import TwinShape, shape_of
from repro.config import Layout, systems
from repro.config.errors import ConfigError


def test_sufficient_ranks_preserve_the_layout() -> None:
    layout = Layout(tp=4, dp=4, micro_batch=8)
    assert shape_of(layout, systems.load_system_file("lowbw-v100"), 16) == TwinShape(4, 4, 4, 1, 4)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(tp=2, dp=32), TwinShape(4, 4, 2, 1, 8)),
        (Layout(dp=64), TwinShape(4, 4, 1, 1, 16)),
        (Layout(tp=4, dp=16), TwinShape(4, 4, 4, 1, 4)),
        (Layout(tp=16, dp=4), TwinShape(4, 4, 4, 1, 4)),  # one node per tp group, as in the original
        (Layout(tp=32), TwinShape(2, 8, 16, 1, 1)),  # two nodes per tp group, as in the original
    ],
)
def test_twin_has_as_many_nodes_with_fewer_ranks(layout: Layout, shape: TwinShape) -> None:
    assert shape_of(layout, systems.load_system_file("dgx2"), 16) == shape


def test_node_of_one_group_can_become_one_rank() -> None:
    layout = Layout(tp=16, dp=8, micro_batch=48, zero=2, pa=True, recompute=True)
    shape = shape_of(layout, systems.load_system_file("dgx2"), 16, tp=1)
    assert shape == TwinShape(16, 1, 1, 1, 16)
    twin = shape.layout(layout)
    assert (twin.replica_batch, twin.pa, twin.precision) == (48, False, "fp32")


def test_stages_are_preserved_if_ranks_suffice() -> None:
    layout = Layout(tp=8, pp=12, dp=4, micro_batch=1, global_batch=1536)
    with pytest.raises(ConfigError, match="nodes"):
        shape_of(layout, systems.load_system_file("selene"), 16)
    shape = shape_of(layout, systems.load_system_file("selene"), 48, tp=1)
    assert shape.layout(layout).accumulation == layout.accumulation
