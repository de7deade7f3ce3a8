"""Tests of the output of `repro models` and `repro systems`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.config import models, systems
from repro.config.files import read_toml
from repro.config.models import REPORT_FILES, load_model, model_aliases, model_names
from repro.config.systems import REPORT_SYSTEMS, load_system_file, system_aliases, system_names
from repro.model.counts import total_parameters
from tests.config.system_texts import PRODUCTS, PROVENANCE

DGX2 = (Path(__file__).parents[2] / "repro/config/systems/dgx2.toml").read_text()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments]) == 0
    return capsys.readouterr().out


def documents(capsys: pytest.CaptureFixture[str], command: str, name: str) -> tuple[list[Any], Any]:
    """Return the JSON documents of all models or systems, and of one of them."""
    found = [json.loads(printed(capsys, command, *words, "--json")) for words in ((), (name,))]
    assert found[1] in found[0]
    return found[0], found[1]


def rows_in_80_columns(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, list[str]]:
    """Return the words of each line of the detailed list by its first word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        lines = printed(capsys, command, "--details").splitlines()
    assert max(map(len, lines)) <= 80
    return {line.split()[0]: line.split() for line in lines if line.strip()}


def test_lists_show_full_names_and_numbers_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_in_80_columns(capsys, "models")
    for name in model_names():
        assert f"{total_parameters(load_model(name)):,}" in rows[name]
    rows = rows_in_80_columns(capsys, "systems")
    assert set(system_names()) <= set(rows)
    assert rows["dgx2"][-5:] == ["16", "34.06", "125", "150", "6.25"]
    assert rows["lowbw-v100"][-5:] == ["4", "16.94", "112", "-", "1.25"]
    assert rows["yuan"][-5:] == ["8", "?", "312", "300", "6.094"]


def test_lists_start_with_the_entries_of_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "models")
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()[1:]]
    assert [row[0] for row in rows[: len(REPORT_FILES)]] == list(REPORT_FILES)
    assert sum(int(row[1]) for row in rows) == len(model_names())
    assert "gpt2-1.5b (gpt2-xl)" in out
    assert {*system_names(), *system_aliases()} <= set(re.findall(r"[\w-]+", printed(capsys, "systems")))
    names = [name for name in rows_in_80_columns(capsys, "systems") if name in system_names()]
    assert set(names[: len(REPORT_SYSTEMS)]) == set(REPORT_SYSTEMS)


def test_details_of_a_model_show_parameters_states_flops_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = " ".join(printed(capsys, "models", "zero-1.38b", "--details").split())
    for message in ("1,212,103,680", "published as 1.38B", "not 1.38B", "ZERO3 Table 10", "P_os+g+p"):
        assert message in out
    assert "GFLOP per token" in out
    assert "FLOP" not in printed(capsys, "models", "t5-11b"), "only its number of parameters is known"


def test_aliases_are_unique() -> None:
    tables = [table for path in models.FILES.glob("*.toml") for table in read_toml(path).get("model", [])]
    files = [read_toml(path) for path in systems.FILES.glob("*.toml")]
    load: Any
    for aliases, names, load, entries in (
        (model_aliases(), model_names(), load_model, tables),
        (system_aliases(), [*system_names(), "local-gpu"], load_system_file, files),
    ):
        assert not set(aliases) & set(names)
        in_files = [alias for entry in entries for alias in entry.get("aliases", [])]
        assert sorted(in_files) == sorted(set(in_files)) == sorted(aliases)
        assert all(load(alias) == load(name) for alias, name in aliases.items())
    assert {"turing-nlg", "llama-3-8b"} <= set(model_aliases())
    found = system_aliases()
    assert found["dgx-a100"] == found["dgx-a100-80gb"] == "selene"
    assert {"dgx-1", "h100"} <= set(found)


def test_details_of_a_system_show_the_source_of_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    for name in set(system_names()) - {"local"}:
        message = " ".join(printed(capsys, "systems", name, "--details").split())
        system = load_system_file(name)
        device, links = system.device, system.links
        quantities = [device.memory_bytes, device.memory_bandwidth, *device.peak_flops.values()]
        quantities += [system.devices_per_node, system.nodes, system.context_used, system.host_memory_bytes]
        quantities += [link.bandwidth for link in links.values()]
        quantities += [device.time.used(field.name) for field in dataclasses.fields(device.time)]
        quantities += [
            link.used(key, of) for key, link in links.items() for of in ("latency_s", "efficiency")
        ]
        assert [one.source for one in quantities if one.source not in message] == [], name
        assert system.note in message, name
        assert ("Memory for tensors: " in message) == (device.memory_bytes.value is not None), name


def test_json_has_every_model_and_system(capsys: pytest.CaptureFixture[str]) -> None:
    found, one = documents(capsys, "models", "yuan-1.0-245b")
    assert [each["name"] for each in found] == model_names()
    assert sum(one["parameters_by_part"].values()) == one["parameters"]
    assert one["states_bytes"]["zero3"]["1024"] == 16 * one["parameters"] / 1024
    found, one = documents(capsys, "systems", "dgx-b200")
    assert [each["name"] for each in found] == system_names()
    assert one["context_bytes"]["value"] is None
    memory, context = one["device"]["memory_bytes"]["value"], one["context_bytes_used"]["value"]
    assert one["allocatable_bytes"] == memory - context
    assert documents(capsys, "systems", "yuan")[1]["allocatable_bytes"] is None


def test_user_file_is_read_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(DGX2.replace("[links.nvlink]", "[links.wire]"))
    assert cli.main(["systems", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: links = 'wire': must be one of memory, nvlink")
    path.write_text(DGX2)
    assert printed(capsys, "systems", str(path)).startswith("ours: NVIDIA V100 SXM3 32 GB")


MEASURED_LINK = """
[links.nvlink.collectives.all_reduce]
points = [[1024, 1e-4], [1048576, 1e-3]]
"""


def test_details_of_a_calibrated_system_show_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(DGX2 + PRODUCTS + MEASURED_LINK + PROVENANCE)
    message = " ".join(printed(capsys, "systems", str(path), "--details").split())
    assert "measured on 2026-01-01 with torch 2.6.0, 4 ranks, 5 repeats; cores 4; processor X" in message
    assert "aten.mm: 2 us + 0 s per byte + 0.01 ps per FLOP" in message
    assert "nvlink all_reduce, 4 ranks: 2 message sizes, 1.024 kB in 100 us to 1.049 MB in 1 ms" in message
    one = json.loads(printed(capsys, "systems", str(path), "--json"))
    assert one["provenance"]["facts"]["cores"] == 4
    assert one["device"]["operators"]["aten.mm"]["fixed_s"] == 2e-6
    assert one["time_used"]["launch_s"]["source"].startswith("assumed")
    assert one["links_used"]["inter-node"]["adapters"]["value"] == 8
