"""Tests of the time-model numbers of a system file: assumed values of optional keys, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import ConfigError
from repro.config.links import ASSUMED_ANY, ASSUMED_LINKS, LINKS
from repro.config.system import System
from repro.config.systems import load_system_file, system_names
from repro.config.timing import ASSUMED
from repro.measure.local_system import load_system
from tests.config.system_texts import NODES, PRODUCTS, PROVENANCE

DEVICE = """
[device]
name = "X"
memory_bytes = { value = 16e9, source = "here" }
memory_bandwidth = { value = 900e9, source = "here" }
"""
PLAIN = NODES + DEVICE
LINK = """
[links.pcie]
per = "device"
bandwidth = { value = 10e9, source = "here" }
"""
TIME, OPERATOR, SEND = "[device.time]\n", "[device.operators.mm]\n", LINK + "[links.pcie.collectives.send]\n"
MEASURED_LINK = """
[links.memory]
per = "node"
bandwidth = { value = 10e9, source = "measured" }
overlap_cost = { value = 0.3, source = "measured" }
[links.memory.collectives.all_reduce]
points = [[1024, 1e-4], [1048576, 1e-3]]
"""
CALIBRATED = PRODUCTS + MEASURED_LINK + PROVENANCE


def system(path: Path, text: str) -> System:
    file = path / "mine.toml"
    file.write_text(PLAIN + text)
    return load_system_file(file)


def test_missing_numbers_are_assumed_with_their_source(tmp_path: Path) -> None:
    plain = system(tmp_path, LINK)
    assert plain.provenance is None
    for key, assumed in ASSUMED.items():
        used = plain.device.time.used(key)
        assert used.value == assumed.value == getattr(plain.timing, key)
        assert used.ends == assumed.ends
        assert used.source.startswith(f"assumed, {assumed.source}")
    assert plain.timing.unaligned_flops is None
    link = plain.links["pcie"]
    for key, assumed in (ASSUMED_LINKS["pcie"] | ASSUMED_ANY).items():
        used = link.used("pcie", key)
        assert (used.value, used.source) == (
            assumed.value,
            f"assumed, {assumed.source}: {link.latency_s.source}",
        )


def test_numbers_of_the_file_replace_assumed_numbers(tmp_path: Path) -> None:
    text = LINK + 'efficiency = { value = 0.5, source = "there" }\n'
    text += '[device.time]\nkernel_s = { value = 1e-6, source = "there" }\n'
    text += 'launch_s = { value = "unknown", source = "nobody says" }\n'
    printed = system(tmp_path, text)
    assert printed.links["pcie"].used("pcie", "efficiency").source == "there"
    assert printed.timing.kernel_s == 1e-6
    assert printed.timing.launch_s == ASSUMED["launch_s"].value
    assert printed.device.time.used("launch_s").source.endswith("nobody says")


def test_calibrated_system_file_is_read(tmp_path: Path) -> None:
    found = system(tmp_path, CALIBRATED)
    assert found.provenance is not None
    assert (found.provenance.ranks, found.provenance.facts["cores"]) == (4, 4)
    assert found.links["memory"].collectives["all_reduce"].points == ((1024, 1e-4), (1048576, 1e-3))
    assert found.device.operators["aten.mm"].seconds(flops=1e9, nbytes=123) == pytest.approx(12e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TIME + 'matmul_eficiency = { value = 1, source = "x" }',
            "device.time.matmul_eficiency = .*did you mean",
        ),
        (TIME + "kernel_s = 3e-6", "device.time.kernel_s = 3e-06: must be a table"),
        (
            TIME + 'memory_efficiency = { value = 1.2, source = "x" }',
            "device.time.memory_efficiency = 1.2: must be more than 0",
        ),
        (
            TIME + 'multiprocessors = { value = 1.5, source = "x" }',
            "device.time.multiprocessors = 1.5: must be an integer",
        ),
        (OPERATOR + "fixed_s = -1", "device.operators.mm.fixed_s = -1.0: must be seconds, 0 or more"),
        (OPERATOR + 'fixed_s = "x"', "device.operators.mm.fixed_s = 'x': must be"),
        (OPERATOR + "fixed_s = 1", "provenance: is missing"),
        (LINK + 'rings = { value = 0, source = "x" }', "links.pcie.rings = 0.0: must be more than 0"),
        (
            LINK + 'overlap_cost = { value = 2, source = "x" }',
            "links.pcie.overlap_cost = 2.0: must be a fraction",
        ),
        (
            LINK + "[links.pcie.collectives.gather]\npoints = [[1, 1]]",
            "collectives = 'gather': must be one of",
        ),
        (SEND + "points = []", "collectives.send.points = .*at least one"),
        (SEND + "points = [[2, 1], [1, 1]]", "points = .*rising bytes"),
        (SEND + "points = [[2, 0]]", "points = 0.0: must be more than 0 seconds"),
        (SEND + "points = [[2]]", r"collectives.send.points"),
        (SEND + "points = [[2, 1]]", "provenance: is missing"),
        (SEND + "points = [[2, 1]]\nstride = 0", "stride = 0: must be an integer of at least 1"),
        (
            SEND + "points = [[2, 1]]\ngroups = [{ points = [[2, 1]] }]",
            r"groups = \[0\]: must be measurements of 2 or more ranks",
        ),
        ("[provenance]\ndate = '2026-01-01'", r"provenance\.torch: is missing"),
    ],
)
def test_error_of_a_mistake_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        system(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/mine.toml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", system_names())
def test_every_system_has_time_model_numbers(name: str) -> None:
    found = load_system(name)
    assert 0 < found.timing.matmul_efficiency <= 1
    for link in found.links:
        assert link in LINKS
        assert found.links[link].used(link, "latency_s").value
