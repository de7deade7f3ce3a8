"""Tests of a user's ledger file, which commands judge together with the packaged ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import cli
from tests.report import synthetic

USER_LEDGER = """
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
def ledger(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(USER_LEDGER)
    return str(path)


def test_claims_judges_a_user_ledger(ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ledger", ledger, "--results", str(tmp_path)]
    assert cli.main(["claims", "mine-states", "--json", *options]) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["id"], [row["verdict"] for row in claim["rows"]]) == ("mine-states", ["follows"])
    for with_packaged, more in ((False, []), (True, ["--all"])):
        assert cli.main(["claims", *more, *options]) == 0
        out = capsys.readouterr().out
        assert "mine-states" in out
        assert ("zero-mem-formula-stages" in out) == with_packaged


def test_every_command_that_judges_reads_the_user_ledger(
    ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the user ledger stops each command."""
    Path(ledger).write_text(USER_LEDGER.replace('unit = "GB"', 'unit = "pounds"'))
    results = str(synthetic.store(tmp_path / "results"))
    stored = ["--results", results]
    page = ["report", "--out", str(tmp_path / "out"), *stored]
    table = ["export", "--table", "values", "--format", "csv", *stored]
    for command in (["artifact"], page, table, ["validate", *stored], ["compare", results, results]):
        assert cli.main([*command, "--ledger", ledger]) == 2, command
        assert capsys.readouterr().err.startswith(f"error: {ledger}: mine-states")


def test_claim_id_of_the_packaged_ledger_is_rejected(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(ledger).write_text(USER_LEDGER.replace("mine-states", "zero-mem-formula-stages"))
    assert cli.main(["claims", "--ledger", ledger]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {ledger}: zero-mem-formula-stages.id = ")
    assert "must be an id used once" in err
