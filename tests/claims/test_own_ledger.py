"""A ledger file of one's own, outside the package, is judged beside the packaged ones."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from repro import cli
from tests.report import synthetic

OWN = """
title = "Mine"

[[source]]
key = "MINE"
title = "A note of ours"
where = "a drawer"

[[claim]]
id = "mine-states"
title = "Model states of 1B parameters under ZeRO 3 on 8 GPUs"
family = "memory"
published = "2 GB"
conditions = "mixed precision, Adam"
source = ["MINE p. 1"]
certainty = "confirmed"
unit = "GB"
metric = "memory"
rows = [{ label = "1B", published = "2.0", analytic = "model_state_bytes(1e9, 8, 3)" }]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    return str(path)


def test_it_is_judged(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "mine-states", "--ledger", own, "--json", "--results", str(tmp_path)]) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["id"] == "mine-states"
    assert [row["verdict"] for row in claim["rows"]] == ["follows"]
    assert cli.main(["claims", "--ledger", own, "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mine-states" in out
    assert "zero-mem-formula-stages" not in out
    assert cli.main(["claims", "--all", "--ledger", own, "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mine-states" in out
    assert "zero-mem-formula-stages" in out


def test_it_is_exported(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas", reason="pandas makes the table; it is in the extra report")
    table = ["--table", "values", "--format", "csv"]
    assert cli.main(["export", "--ledger", own, "--results", str(tmp_path), *table]) == 0
    assert "mine-states" in {row["claim"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}


def test_every_command_that_judges_has_it(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad file of one's own stops each of them."""
    assert cli.main(["artifact", "--ledger", own]) == 0
    assert "### mine-states" in capsys.readouterr().out
    Path(own).write_text(OWN.replace('unit = "GB"', 'unit = "pounds"'))
    results = str(synthetic.store(tmp_path / "results"))
    stored = ["--results", results]
    page = ["report", "--out", str(tmp_path / "out"), *stored]
    for command in (["artifact"], page, ["validate", *stored], ["compare", results, results]):
        assert cli.main([*command, "--ledger", own]) == 2, command
        assert capsys.readouterr().err.startswith(f"error: {own}: mine-states")


def test_an_id_that_is_taken_is_refused(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(own).write_text(OWN.replace("mine-states", "zero-mem-formula-stages"))
    assert cli.main(["claims", "--ledger", own]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {own}: zero-mem-formula-stages.id = ")
    assert "must be used once" in err
