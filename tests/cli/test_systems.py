"""Tests of the output of `repro systems`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from repro import cli
from repro.config.files import read_toml
from repro.config.systems import FILES, REPORT_SYSTEMS, load_system_file, system_aliases, system_names
from repro.report.text.models_and_systems import print_systems
from tests.config.system_texts import PRODUCTS, PROVENANCE

DGX2_FILE = Path(__file__).parents[2] / "repro/config/systems/dgx2.toml"


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_list_shows_full_names_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_systems("", False) == 0
    assert set(system_names()) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert print_systems("", False, details=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert set(system_names()) <= set(rows)
    assert rows["dgx2"][-5:] == ["16", "34.06", "125", "150", "6.25"]
    assert rows["lowbw-v100"][-5:] == ["4", "16.94", "112", "-", "1.25"]
    assert rows["yuan"][-5:] == ["8", "?", "312", "300", "6.094"]
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in system_names()]
    assert set(names[: len(REPORT_SYSTEMS)]) == set(REPORT_SYSTEMS)


def test_alias_of_a_system_is_unique(capsys: pytest.CaptureFixture[str]) -> None:
    aliases = system_aliases()
    assert aliases["dgx-a100"] == aliases["dgx-a100-80gb"] == "selene"
    assert {"dgx-1", "h100"} <= set(aliases)
    assert not set(aliases) & {*system_names(), "local-gpu"}
    in_files = [alias for path in FILES.glob("*.toml") for alias in read_toml(path).get("aliases", [])]
    assert sorted(in_files) == sorted(set(in_files)) == sorted(aliases)
    assert all(load_system_file(alias) == load_system_file(name) for alias, name in aliases.items())
    assert cli.main(["systems"]) == 0
    assert set(aliases) <= set(re.split(r"[\s,]+", capsys.readouterr().out))


def test_details_show_the_source_of_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    for name in set(system_names()) - {"local"}:
        assert print_systems(name, False, details=True) == 0
        message, system = " ".join(capsys.readouterr().out.split()), load_system_file(name)
        device = system.device
        for quantity in (
            *(device.memory_bytes, device.memory_bandwidth, *device.peak_flops.values()),
            *(system.devices_per_node, system.nodes, system.context_used, system.host_memory_bytes),
            *(link.bandwidth for link in system.links.values()),
            *(device.time.used(field.name) for field in dataclasses.fields(device.time)),
            *(
                link.used(key, one)
                for key, link in system.links.items()
                for one in ("latency_s", "efficiency")
            ),
        ):
            assert quantity.source in message, name
        assert system.note in message, name
        assert ("Memory for tensors: " in message) == (device.memory_bytes.value is not None), name


def test_json_has_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_systems("", True) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in documents] == system_names()
    assert print_systems("dgx-b200", True) == 0
    one = json.loads(capsys.readouterr().out)
    assert one in documents
    assert one["context_bytes"]["value"] is None
    memory, context = one["device"]["memory_bytes"]["value"], one["context_bytes_used"]["value"]
    assert one["allocatable_bytes"] == memory - context
    assert print_systems("yuan", True) == 0
    assert json.loads(capsys.readouterr().out)["allocatable_bytes"] is None


def test_user_file_is_read_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(DGX2_FILE.read_text().replace("[links.nvlink]", "[links.wire]"))
    assert cli.main(["systems", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: links = 'wire': must be one of memory, nvlink")
    path.write_text(DGX2_FILE.read_text())
    assert cli.main(["systems", str(path)]) == 0
    assert capsys.readouterr().out.startswith("ours: NVIDIA V100 SXM3 32 GB")


MEASURED_LINK = """
[links.nvlink.collectives.all_reduce]
points = [[1024, 1e-4], [1048576, 1e-3]]
"""
CALIBRATED = PRODUCTS + MEASURED_LINK + PROVENANCE


def test_details_of_a_calibrated_system_show_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(DGX2_FILE.read_text() + CALIBRATED)
    assert cli.main(["systems", str(path), "--details"]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "measured on 2026-01-01 with torch 2.6.0, 4 ranks, 5 repeats; cores 4; processor X" in message
    assert "aten.mm: 2 us + 0 s per byte + 0.01 ps per FLOP" in message
    assert "nvlink all_reduce, 4 ranks: 2 message sizes, 1.024 kB in 100 us to 1.049 MB in 1 ms" in message
    assert cli.main(["systems", str(path), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["provenance"]["facts"]["cores"] == 4
    assert one["device"]["operators"]["aten.mm"]["fixed_s"] == 2e-6
    assert one["time_used"]["launch_s"]["source"].startswith("assumed")
    assert one["links_used"]["inter-node"]["adapters"]["value"] == 8
