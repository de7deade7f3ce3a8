"""Tests of `repro export`, whose tables have the numbers of the claims and the store, and of `repro artifact`."""

from __future__ import annotations

import csv
import io
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.claims.run_commands import ROOT, SuiteCatalogue, covering_globs, experiments_of
from repro.config import Experiment, Layout, models, systems
from repro.launch.simulated import simulate_experiment
from repro.report.export import TABLES
from repro.results.store import Store


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["export", *arguments]) == 0
    return capsys.readouterr().out


# The table of uncertain inputs needs predictions: see tests/accuracy/validate/test_unknowns.py.
@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("table", [table for table in TABLES if table != "unknowns"])
def test_every_table_is_exported(
    synthetic_results: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    """A table for a paper, in Markdown or LaTeX, has three to six of the columns of a CSV file."""
    command = ("--results", str(synthetic_results), "--table", table, "--format")
    rows = list(csv.reader(io.StringIO(exported(capsys, *command, "csv"))))
    lines = exported(capsys, *command, "markdown").splitlines()
    assert len(lines) == len(rows) + 1 > 3
    assert 3 <= len(lines[0].strip("|").split("|")) <= 6


@pytest.mark.usefixtures("judged_once")
def test_rows_and_columns_are_selected(synthetic_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(synthetic_results), "--format", "latex"]
    chosen = [*results, "--table", "values", "--claims", "zero-fig2-*", "--columns", "claim,value,published"]
    lines = exported(capsys, *chosen).splitlines()
    assert (lines[0], lines[3]) == ("% \\usepackage{booktabs}", r"claim & value & published \\")
    rows = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert rows
    assert all(row.startswith("zero-fig2-") for row in rows)
    assert any(row.endswith(r"& 38 TFLOP/s \\") for row in rows)
    heading = exported(capsys, *results, "--table", "experiments").split("\\toprule")[1].splitlines()[1]
    assert 3 <= len(heading.split(" & ")) <= 6
    assert "step (s) & " in heading
    assert "memory peak (GB)" in heading
    headline = exported(capsys, *results, "--table", "headlines", "--claims", "zero-fig2-throughput")
    assert headline.count("15 PFLOP/s") == 1
    several = "--claims zero-fig2-throughput --claims zero-fig2-* --claims ds-3p75x-lowbw"
    text = exported(capsys, *results, *several.split(), "--columns", "claim,emulated")
    assert r"claim & emulated \\" in text, "a named column appears although it is empty"
    assert [text.count(f"\n{claim} & ") for claim in ("zero-fig2-throughput", "ds-3p75x-lowbw")] == [1, 1]


@pytest.mark.usefixtures("judged_once")
def test_parquet_has_the_claims_of_the_csv(
    synthetic_results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow writes parquet; it is in the extra test")
    path = tmp_path / "values.parquet"
    results = ["--results", str(synthetic_results)]
    exported(capsys, *results, "--table", "values", "--format", "parquet", "--output", str(path))
    text = exported(capsys, *results, "--table", "values", "--format", "csv")
    assert list(pd.read_parquet(path)["claim"]) == list(pd.read_csv(io.StringIO(text))["claim"])


def test_export_of_an_empty_store_has_the_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ("--results", str(tmp_path))
    assert "zero-mem-formula-stages" in exported(capsys, *results)
    for table in ("experiments", "records"):
        assert cli.main(["export", *results, "--table", table, "--format", "csv"]) == 0
        out, err = capsys.readouterr()
        assert not out.strip()
        assert err == f"note: the table is empty, because the folder {tmp_path} has no {table}\n"


def test_steps_that_do_not_fit_have_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record has operator times, which claims compare with published rates, but no table contains them."""
    with Store(tmp_path) as store:
        for name, dp in (("fits", 16), ("does-not", 1)):
            model, system = models.load_model("gpt2-1.5b"), systems.load_system_file("lowbw-v100")
            layout = Layout(dp=dp, zero=3)
            experiment = Experiment(name=name, model=model, layout=layout, system="lowbw-v100")
            store.append(simulate_experiment(experiment, system, "made-up"))
    text = exported(capsys, "--results", str(tmp_path), "--table", "experiments", "--format", "csv")
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(text))}
    assert {name: row["outcome"] for name, row in rows.items()} == {"fits": "ok", "does-not": "oom"}
    times = re.compile("step_seconds|time[.]|.*_per_s")
    timed = [column for column in rows["fits"] if times.match(column)]
    assert len(timed) > 10
    assert all(rows["fits"][column] for column in timed)
    assert not any(rows["does-not"][column] for column in [*timed, "mfu"])
    assert rows["does-not"]["memory.peak_bytes"]


def test_committed_appendix_has_every_claim_once_with_its_command(tmp_path: Path) -> None:
    path = tmp_path / "artifact.md"
    assert cli.main(["artifact", "--output", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert (ROOT / "reports/artifact.md").read_text(encoding="utf-8") == text, "run `make artifact`"
    named = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(claim.id for claim in load_ledger().claims)
    assert "repro submit suites/zero_r.toml --profile slurm/dgx2.toml" in text
    assert "400 GPUs of dgx2" in text


def test_commands_of_a_claim_run_only_its_experiments() -> None:
    catalogue = SuiteCatalogue()
    for claim in load_ledger().claims:
        required = set(experiments_of(claim.rows))
        commanded = set()
        for command in catalogue.commands(required):
            patterns = re.findall(r"--only '([^']+)'", command.text) or ["*"]
            names = [entry.experiment.name for entry in catalogue.suites[command.suite].entries]
            chosen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
            assert chosen == set(command.names), (claim.id, command.text)
            commanded |= {(command.kind, f"{command.suite}/{name}") for name in chosen}
        assert required <= commanded, claim.id
        # A command for a simulated experiment may also measure it on its cluster.
        assert {name for _, name in commanded} == {name for _, name in required}, claim.id


def test_covering_globs_are_short_and_exact() -> None:
    assert covering_globs({"a-1", "a-2"}, ["a-1", "a-2", "b-1"]) == ["a-*"]
    assert covering_globs({"a-1", "b-1"}, ["a-1", "a-2", "b-1"]) == ["a-1", "b-1"]
    assert covering_globs({"a"}, ["a", "ab"]) == ["a"]
    assert covering_globs({"a", "ab"}, ["a", "ab"]) == ["a*"]
