"""Numbers with a range: what a file may say, what is listed as unknown, and systems with other values of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.config.quantity import Quantity
from repro.config.systems import load_system_file, system_names
from repro.config.systems.unknowns import (
    BEST,
    DRAWS,
    HIGH,
    LOW,
    Unknown,
    drawn,
    quantiles_in_cases,
    unknowns,
    with_values,
)
from repro.measure.local_system import load_system
from tests.config.system_arrays import array_values
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


def written(path: Path, printed: str, more: str = "") -> Path:
    file = path / "mine.toml"
    file.write_text(NODES + DEVICE.replace("RANGE", printed) + more)
    return file


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ('low = 800e9, source = "there; low: a copy"', None),
        ('low = 900e9, high = 900e9, source = "low: x; high: x"', None),
        (
            'low = 901e9, source = "low: x"',
            "low = 901000000000.0: must be 0 or more and at most value = 9000000",
        ),
        ('low = -1, source = "low: x"', "memory_bandwidth.low = -1.0: must be 0 or more"),
        (
            'high = 899e9, source = "high: x"',
            "high = 899000000000.0: must be at least value = 900000000000.0",
        ),
        (
            'low = 800e9, source = "a copy"',
            'memory_bandwidth.low = 800000000000.0: has no reason: source must say "lo',
        ),
        (
            'high = 1e12, source = "low: x"',
            "memory_bandwidth.high = 1000000000000.0: has no reason: source must say",
        ),
        ('low = "much", source = "low: x"', "memory_bandwidth.low = 'much'"),
        ('low = 0, source = "low: nothing"', "memory_bandwidth = 0.0: must be more than 0"),
    ],
)
def test_a_range_is_about_its_value_and_has_reasons(
    tmp_path: Path, printed: str, message: str | None
) -> None:
    file = written(tmp_path, printed)
    if message is None:
        assert load_system_file(file).device.memory_bandwidth.ranges
        return
    with pytest.raises(ConfigError) as caught:
        load_system_file(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_unknown_or_counted_has_ends_of_the_same_kind() -> None:
    with pytest.raises(ConfigError, match="an unknown number has no range"):
        Quantity(value=None, low=1.0, source="low: x")
    for name in system_names():
        for one in unknowns(load_system(name)):
            assert one.low <= one.best <= one.high
            assert one.low < one.high, f"{name}: {one.key}"


def test_a_number_that_is_assumed_is_unknown_as_well_but_not_beside_a_measurement(tmp_path: Path) -> None:
    file = written(tmp_path, 'source = "here"')
    found = {one.key: (one.low, one.best, one.high) for one in unknowns(load_system_file(file))}
    assert found["links.inter-node.rings"] == (1, 2, 4)
    assert found["device.time.launch_s"][1] == load_system_file(file).timing.launch_s
    assert "device.memory_bandwidth" not in found
    calibrated = written(tmp_path, 'source = "here"', PRODUCTS + PROVENANCE)
    assert unknowns(load_system_file(calibrated)) == ()


@pytest.mark.parametrize("name", ["dgx2", "yuan", "lowbw-v100"])
def test_a_system_with_other_values_has_these_and_no_others(name: str) -> None:
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
    moved = with_values(system, {"device.time.kernel_s": 1.0, "links.inter-node.rings": 3, "nodes": 7})
    assert (moved.timing.kernel_s, moved.links["inter-node"].rings.value, moved.nodes.value) == (1.0, 3, 7)
    assert moved.nodes.source == system.nodes.source


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))
def test_values_rise_with_the_quantile_between_the_ends(
    low: float, more: float, yet: float, a: float, b: float
) -> None:
    one = Unknown(key="device.x", low=low, best=low + more, high=low + more + yet, source="")
    first, second = sorted((a, b))
    assert one.values_at([LOW, BEST, HIGH]).tolist() == [one.low, one.best, one.high]
    slack = 1e-9
    lower, upper = one.values_at([first, second])
    assert one.low - slack <= lower <= upper + slack <= one.high + 2 * slack


def test_each_unknown_moves_alone_and_joint_draws_fill_every_part_of_a_range_alike() -> None:
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
