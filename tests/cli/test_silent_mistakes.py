"""Tests of mistakes that must not pass silently: missing folders, zeros, invalid file names, empty tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import cli
from repro.config.suites import load_suite
from repro.results.store import Store
from tests.records import made_up

SUITE = '[suite]\nname = "s"\n[[experiment]]\nname = "a"\nmodel = "gpt2-tiny"\n'


@pytest.mark.parametrize(
    "command", [["claims"], ["export"], ["validate"], ["report"], ["compare", "a", "b"]], ids=lambda c: c[0]
)
def test_missing_results_folder_is_an_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--results", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: --results = 'nowhere': no such folder\n"
    assert cli.main([*command, "--results", ""]) == 2
    assert capsys.readouterr().err == "error: --results = '': is empty\n"


def test_missing_default_results_folder_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["claims"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("evidence", ["measured", "simulated"])
def test_results_folder_that_is_a_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], evidence: str
) -> None:
    (tmp_path / "s.toml").write_text(SUITE)
    (tmp_path / "file").write_text("")
    results = tmp_path / "file"
    assert cli.main(["run", str(tmp_path / "s.toml"), "--results", str(results), "--evidence", evidence]) == 2
    assert f"--results = '{results}': must be a folder, but is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["simulate", "--model", "gpt2-1.5b", "--system", "dgx2", "--gpus", "8", "--seq", "0"], "--seq"),
        (["fit", "--system", "dgx2", "--gpus", "8", "--hidden", "0"], "--hidden"),
        (["calibrate", "--system", "local", "--gpus", "0"], "--gpus"),
        (["twin", "ds-3p75x-lowbw", "--tp", "0"], "--tp"),
    ],
)
def test_option_zero_does_not_select_the_default(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert f"error: {option} = 0: must be an integer of at least 1" in capsys.readouterr().err


def test_unwritable_output_is_an_error_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    """No user can create a file in /proc, not even root."""
    assert cli.main(["calibrate", "--system", "local", "--quick", "--output", "/proc/here.toml"]) == 2
    assert "--output = '/proc/here.toml': must be a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b", "../a", ".a", "a" * 5000, "a\\nb"], ids=lambda name: name[:4])
@pytest.mark.parametrize("old", ['"a"', '"s"'], ids=["experiment", "suite"])
def test_names_must_be_valid_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, old: str
) -> None:
    (tmp_path / "s.toml").write_text(SUITE.replace(old, f'"{name}"'))
    assert cli.main(["run", str(tmp_path / "s.toml")]) == 2
    err = capsys.readouterr().err
    assert "must be a name of at most 100 characters without /" in err
    assert len(err) < 500


def test_suite_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SUITE, encoding="utf-8-sig")
    assert load_suite(tmp_path / "s.toml").name == "s"


def test_blank_lines_in_a_store_are_ignored(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(made_up("a"))
        assert store.path is not None
        path = store.path
    path.write_text(f"\n{path.read_text()}\n  \n")
    store = Store(tmp_path)
    assert len(store.records()) == 1
    assert store.skipped == []


def test_export_of_an_empty_table_prints_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas", reason="pandas makes the table; it is in the extra report")
    assert cli.main(["export", "--results", str(tmp_path), "--table", "records", "--format", "csv"]) == 0
    assert capsys.readouterr().err == f"note: the table is empty, because {tmp_path} has no records\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "SUITE = '': must be one suite or more, or --claim ID"),
        (["smoke", "--claim", "5"], "SUITE = 'smoke': must be one suite or more, or --claim ID"),
        (["--claim", "5", "--only", "x"], "--only = 'x': cannot be combined with --claim"),
        (
            ["--claim", "ds-same-loss", "--evidence", "simulated"],
            "has no simulated evidence; `repro claims ds",
        ),
    ],
)
def test_run_needs_suites_or_a_claim_with_this_evidence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_run_of_a_claim_selects_its_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Suites of other claims have experiments with the same names."""
    assert (
        cli.main(["run", "--claim", "ds-3p75x-lowbw", "--dry-run", "--json", "--results", str(tmp_path)]) == 0
    )
    found = {(each["suite"], each["name"]) for each in json.loads(capsys.readouterr().out)}
    assert {suite for suite, _ in found} >= {"windtunnel_3p75x", "windtunnel_smoke"}
    assert all(name.startswith("lowbw-") for _, name in found)
