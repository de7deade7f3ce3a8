"""`repro init` writes a suite that runs as it is, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import cli
from repro.config.suites import load_suite
from tests.records import latest


@pytest.mark.slow
def test_it_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "first.toml"]) == 0
    assert "next: repro run first.toml --dry-run" in capsys.readouterr().out
    suite = load_suite(Path("first.toml"))
    assert suite.name == "first"
    assert cli.main(["run", "first.toml"]) == 0
    records = latest(tmp_path / "results")
    assert {record["name"] for record in records.values()} == {"plain", "zero2", "tensor"}
    assert {record["outcome"] for record in records.values()} == {"ok"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("there.toml", "is there already"),
        ("a.txt", "must be a file that ends in .toml"),
        ("no/a.toml", "folder"),
    ],
)
def test_what_it_does_not_write(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("mine")
    assert cli.main(["init", name]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert Path("there.toml").read_text() == "mine"
