"""Tests of the output of `repro models`."""

from __future__ import annotations

import json

import pytest

from repro.config.files import read_toml
from repro.config.models import FILES, REPORT_FILES, load_model, model_aliases, model_names
from repro.model.counts import total_parameters
from repro.report.text.models_and_systems import print_models


def test_list_shows_full_names_and_parameters_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert print_models(None, False, details=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line.strip()}
    for name in model_names():
        assert f"{total_parameters(load_model(name)):,}" in rows[name]


def test_details_show_parameters_states_flops_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_models("zero-1.38b", False, details=True) == 0
    out = " ".join(capsys.readouterr().out.split())
    for message in ("1,212,103,680", "published as 1.38B", "not 1.38B", "ZERO3 Table 10", "P_os+g+p"):
        assert message in out
    assert "GFLOP per token" in out
    assert print_models("t5-11b", False) == 0
    assert "FLOP" not in capsys.readouterr().out, "only its number of parameters is known"


def test_list_starts_with_the_models_of_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_models(None, False) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()[1:]]
    assert [row[0] for row in rows[: len(REPORT_FILES)]] == list(REPORT_FILES)
    assert sum(int(row[1]) for row in rows) == len(model_names())
    assert "gpt2-1.5b (gpt2-xl)" in out


def test_alias_of_a_model_is_unique() -> None:
    aliases = model_aliases()
    assert {"turing-nlg", "llama-3-8b"} <= set(aliases)
    assert not set(aliases) & set(model_names())
    tables = [table for path in FILES.glob("*.toml") for table in read_toml(path).get("model", [])]
    aliases_in_files = [alias for table in tables for alias in table.get("aliases", [])]
    assert sorted(aliases_in_files) == sorted(set(aliases_in_files)) == sorted(aliases)
    assert all(load_model(alias) == load_model(name) for alias, name in aliases.items())


def test_json_has_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_models(None, True) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in documents] == model_names()
    assert print_models("yuan-1.0-245b", True) == 0
    one = json.loads(capsys.readouterr().out)
    assert one in documents
    assert sum(one["parameters_by_part"].values()) == one["parameters"]
    assert one["states_bytes"]["zero3"]["1024"] == 16 * one["parameters"] / 1024
