"""Tests of the modules that become gather units (blocks), and of the unit that a parameter belongs to."""

from __future__ import annotations

import pytest
from torch import nn

from repro.parallel.zero.partition import GatherUnit, ModuleUse, default_units, parameters_by_unit
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
