"""Which modules of a model are its blocks."""

from __future__ import annotations

import pytest
from torch import nn

from repro.parallel.zero.units import default_units
from tests.wrap.edge_models import Containers


def test_blocks_are_the_nearest_modules_with_a_forward() -> None:
    names = [unit.name for unit in default_units(Containers())]
    assert names == [
        *(f"dictionaries.{i}.{key}" for i in range(2) for key in ("up", "down")),
        *(f"nested.{i}.{k}" for i in range(2) for k in range(2)),
        "holders.0.inner",
        "",
    ]


def test_a_block_under_two_names_is_one_unit() -> None:
    module = nn.Module()
    shared = nn.Linear(2, 2)
    module.encoder = nn.ModuleList([shared, nn.Linear(2, 2)])
    module.decoder = nn.ModuleList([shared, nn.ModuleList([nn.Linear(2, 2), shared])])
    assert [unit.name for unit in default_units(module)] == ["encoder.0", "encoder.1", "decoder.1.0", ""]


@pytest.mark.parametrize("name", ["dictionaries", "dictionaries.0", "nested.1", "holders.0", "scales.0"])
def test_a_container_is_no_block(name: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks: '{name}': \w+ has no forward of its own"):
        default_units(Containers(), [name])
