"""Tests of uncertain inputs of a system: ranges in system files, the list of unknowns, and cases of a system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems import load_system_file, system_names
from repro.config.systems.unknowns import (
    BEST,
    DRAWS,
    HIGH,
    LOW,
    Lanes,
    Unknown,
    drawn,
    quantiles_in_cases,
    unknowns,
    with_values,
)
from repro.measure.local_system import load_system
from tests.config.system_texts import NODES, PRODUCTS, PROVENANCE

DEVICE = """
[device]
name = "X"
memory_bytes = { value = 16e9, source = "here" }
memory_bandwidth = { value = 900e9, RANGE }
[links.inter-node]
per = "node"
bandwidth = { value = 10e9, source = "here" }
rings = { value = 2, low = 1, high = 4, source = "low: one; high: four" }
"""


def array_values(system: System) -> dict[str, Lanes]:
    """Return the numbers of a system that are arrays, by key."""
    device = system.device
    parts: dict[str, Any] = {f"device.{key}": one for key, one in vars(device).items()}
    parts |= {f"device.time.{key}": one for key, one in vars(device.time).items()}
    parts |= {f"device.peak_flops.{key}": one for key, one in device.peak_flops.items()}
    for name, link in system.links.items():
        parts |= {f"links.{name}.{key}": one for key, one in vars(link).items()}
    numbers = {key: one.value for key, one in parts.items() if isinstance(one, Quantity)}
    return {key: value for key, value in numbers.items() if isinstance(value, np.ndarray)}


def system_of_case(system: System, case: int) -> System:
    """Return `system` with its arrays replaced by their values in one case."""
    return with_values(system, {key: value[case].item() for key, value in array_values(system).items()})


def write_system(path: Path, printed: str, more: str = "") -> Path:
    file = path / "mine.toml"
    file.write_text(NODES + DEVICE.replace("RANGE", printed) + more)
    return file


LOW_ABOVE = "low = 901000000000.0: must be in the range from 0 to value = 9000000"
HIGH_BELOW = "high = 899000000000.0: must be at least value = 900000000000.0"


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ('low = 901e9, source = "low: x"', LOW_ABOVE),
        ('low = -1, source = "low: x"', "memory_bandwidth.low = -1.0: must be in the range from 0"),
        ('high = 899e9, source = "high: x"', HIGH_BELOW),
        ('low = 800e9, source = "a copy"', "low = 800000000000.0: has no explanation: the key source"),
        ('high = 1e12, source = "low: x"', "high = 1000000000000.0: has no explanation: the key source"),
        ('low = "much", source = "low: x"', "memory_bandwidth.low = 'much'"),
        ('low = 0, source = "low: nothing"', "memory_bandwidth = 0.0: must be more than 0"),
    ],
)
def test_range_contains_its_value_and_has_reasons(tmp_path: Path, printed: str, message: str) -> None:
    file = write_system(tmp_path, printed)
    with pytest.raises(ConfigError) as caught:
        load_system_file(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknowns_have_a_best_value_between_two_ends(tmp_path: Path) -> None:
    """A range may have one end, or end at its value."""
    for printed in (
        'low = 800e9, source = "low: a"',
        'low = 900e9, high = 900e9, source = "low: x; high: x"',
    ):
        assert load_system_file(write_system(tmp_path, printed)).device.memory_bandwidth.ranges
    with pytest.raises(ConfigError, match="cannot be combined with an unknown value"):
        Quantity(value=None, low=1.0, source="low: x")
    for name in system_names():
        for one in unknowns(load_system(name)):
            assert one.low <= one.best <= one.high
            assert one.low < one.high, f"{name}: {one.key}"


def test_assumed_numbers_are_unknowns_only_without_a_calibration(tmp_path: Path) -> None:
    file = write_system(tmp_path, 'source = "here"')
    found = {one.key: (one.low, one.best, one.high) for one in unknowns(load_system_file(file))}
    assert found["links.inter-node.rings"] == (1, 2, 4)
    assert found["device.time.launch_s"][1] == load_system_file(file).timing.launch_s
    assert "device.memory_bandwidth" not in found
    calibrated = write_system(tmp_path, 'source = "here"', PRODUCTS + PROVENANCE)
    assert unknowns(load_system_file(calibrated)) == ()


@pytest.mark.parametrize("name", ["dgx2", "yuan", "lowbw-v100"])
def test_drawn_system_differs_in_the_given_unknowns_only(name: str) -> None:
    system = load_system_file(name)
    found = {one.key: one for one in unknowns(system)}
    assert drawn(system, {}) is system
    for key, one in found.items():
        other = drawn(system, {key: np.array([LOW, BEST, HIGH])})
        assert {name: values.tolist() for name, values in array_values(other).items()} == (
            {key: [one.low, one.best, one.high]} if key.startswith(("device.", "links.")) else {}
        )
        assert {each.key: each for each in unknowns(other)} == {
            other_key: each for other_key, each in found.items() if other_key != key
        }
    other = with_values(system, {"device.time.kernel_s": 1.0, "links.inter-node.rings": 3, "nodes": 7})
    assert (other.timing.kernel_s, other.links["inter-node"].rings.value, other.nodes.value) == (1.0, 3, 7)
    assert other.nodes.source == system.nodes.source


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))
def test_values_rise_with_the_quantile(
    low: float, best_more: float, high_more: float, a: float, b: float
) -> None:
    one = Unknown(key="device.x", low=low, best=low + best_more, high=low + best_more + high_more, source="")
    first, second = sorted((a, b))
    assert one.values_at([LOW, BEST, HIGH]).tolist() == [one.low, one.best, one.high]
    slack = 1e-9
    lower, upper = one.values_at([first, second])
    assert one.low - slack <= lower <= upper + slack <= one.high + 2 * slack


def test_cases_vary_one_unknown_or_draw_all_unknowns_uniformly() -> None:
    keys = ("links.inter-node.rings", "device.x")
    found = tuple(Unknown(key=key, low=1, best=1, high=8, source="") for key in keys)
    quantiles = quantiles_in_cases(found)
    assert {column[0] for column in quantiles.values()} == {BEST}
    alone = {key: column[1:-DRAWS] for key, column in quantiles.items()}
    joint = {key: column[-DRAWS:] for key, column in quantiles.items()}
    assert alone[keys[0]].tolist() == [*found[0].moves, *[BEST] * len(found[1].moves)]
    assert alone[keys[1]].tolist() == [*[BEST] * len(found[0].moves), *found[1].moves]
    for column in joint.values():
        assert sorted((column * DRAWS).astype(int).tolist()) == list(range(DRAWS))
    assert joint[keys[0]].tolist() != joint[keys[1]].tolist()
    assert quantiles_in_cases(found[:1])[keys[0]][-DRAWS:].tolist() == joint[keys[0]].tolist()
    assert set(found[0].values_at(joint[keys[0]]).tolist()) == set(range(1, 9))
