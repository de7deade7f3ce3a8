"""Stores that are not as one would wish: empty, all failed, cut, edited, of another protocol, large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.claims.run_commands import SuiteCatalogue
from repro.config import PROTOCOL
from repro.report import evidence
from repro.report.figures import peak_memory
from repro.report.figures.style import figure_style
from repro.report.page import context
from repro.report.page.build import build_report
from repro.report.page.context import MAX_RECORDS
from repro.results.measured import experiment_record
from repro.results.select import select
from tests.report import large, synthetic
from tests.report.test_page import too_large

COMMANDS = (
    ["claims"],
    ["claims", "--json"],
    ["claims", "zero-mem-formula-stages"],
    *(["export", "--table", table] for table in ("summary", "claims", "values", "experiments", "records")),
    ["validate"],
)


def lines(root: Path, *texts: str | bytes) -> Path:
    folder = root / "results" / "records"
    folder.mkdir(parents=True)
    path = folder / "writer.jsonl"
    path.write_bytes(b"\n".join(t if isinstance(t, bytes) else t.encode() for t in texts) + b"\n")
    return path


def good(**changes: Any) -> str:
    """The first synthetic record, changed."""
    e = synthetic.experiments()[0]
    made = experiment_record(
        e, synthetic.results(e), suite="smoke", provenance=synthetic.PROVENANCE, wall_s=1
    )
    return json.dumps({**made.as_dict(), **changes})


def without(key: str) -> str:
    record = json.loads(good())
    del record[key]
    return json.dumps(record)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("store", ["empty", "failures", "damaged"])
def test_every_command_that_reads_says_something_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, command: list[str]
) -> None:
    (tmp_path / "results").mkdir()
    if store == "failures":
        kinds = ("hang", "error", "timeout", "oom", "diverged")
        failed = [
            good(outcome=k, reason=f"it was {k}", metrics={}, series={}, memory_by_rank=[]) for k in kinds
        ]
        lines(tmp_path, *failed)
    elif store == "damaged":
        lines(tmp_path, good(), '{"kind": "experiment"', without("metrics"), good(protocol=PROTOCOL + 1))
    assert cli.main([*command, "--results", str(tmp_path / "results")]) == 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if store == "damaged":
        assert f"{tmp_path}/results/records/writer.jsonl:2: not a record, skipped" in err
        assert "writer.jsonl:3: metrics: missing in a record of kind experiment; skipped" in err


@pytest.mark.usefixtures("without_figures")
def test_a_store_of_failures_only_has_a_page_that_says_so(tmp_path: Path) -> None:
    kinds = ("hang", "error", "timeout")
    lines(tmp_path, *(good(name=k, outcome=k, reason=f"it was {k}", metrics={}, series={}) for k in kinds))
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert any("without a conclusive result: smoke/error (error)" in remark for remark in report.remarks)
    assert "it was timeout" in (tmp_path / "out/records.js").read_text()
    assert report.verdicts["reproduced"] > 0  # closed forms need no record


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a record"),
        (b"\x00\xff\xfe", "not a record"),
        ("[" * 100_000, "not a record"),
        ("[1]", "not a record"),
        ("{}", "kind: must be one of experiment"),
        (without("metrics"), "metrics: missing in a record of kind experiment"),
        (good(metrics=[]), "metrics: of another type in a record of kind experiment"),
        (good(experiment={}), "experiment.model: missing in a record of kind experiment"),
        ('{"kind": "comparison"}', "suite: missing in a record of kind comparison"),
    ],
    ids=["cut", "bytes", "deep", "list", "empty", "no metrics", "odd metrics", "no model", "comparison"],
)
def test_a_line_that_is_no_record_is_named_and_the_rest_is_read(
    tmp_path: Path, line: str | bytes, message: str
) -> None:
    path = lines(tmp_path, good(), line, good(name="after"))
    found = evidence.read_store(tmp_path / "results")
    assert [record.name for record in found.records] == ["states-z0-dp1", "after"]
    assert len(found.torn) == 1
    assert found.torn[0].startswith(f"{path}:2: {message}")


@pytest.mark.usefixtures("without_figures")
def test_bad_lines_and_other_protocols_are_on_the_page_counted_where_there_are_many(tmp_path: Path) -> None:
    others = [good(protocol=protocol, name="of-another-protocol") for protocol in (PROTOCOL + 1, None)]
    path = lines(tmp_path, *["{"] * 25, *others, good(name="now"))
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert report.remarks[0] == f"{path}:1: not a record, skipped"
    assert report.remarks[10:12] == [
        "15 more lines of the store are not records",
        "2 records of another version of the measurement protocol are omitted, because they are not comparable",
    ]
    assert f"{path}:1: not a record" in report.page.read_text()
    assert "of-another-protocol" not in (tmp_path / "out/records.js").read_text()
    assert report.experiments == 1
    assert list(evidence.read_store(tmp_path / "results").provenance()["judged"]) == [False, False, True]


@pytest.mark.usefixtures("without_figures")
def test_results_that_are_a_file_are_an_empty_store_or_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code = cli.main(["report", "--results", str(tmp_path / "file"), "--out", str(tmp_path / "out")])
    assert code in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_large_store_has_pages_below_the_limits(tmp_path: Path) -> None:
    """2,100 records, without figures; `make benchmarks` has 10,000, figures and the clock."""
    found = evidence.read_store(large.store(tmp_path / "results", 2_100))
    assert len(found.records) == 2_100
    chosen = select(found.records)
    assert min(len(chosen.measured), len(chosen.simulated)) > 2 * MAX_RECORDS
    values = context.context(found, chosen, [], [], SuiteCatalogue())
    site = context.render_site({**values, "notebooks": []})
    assert list(too_large(site)) == []
    text = site["experiments.html"]
    assert "that no claim and no figure reads are not listed here" in text
    assert "repro export --table experiments --format csv" in text
    with figure_style():
        assert len(peak_memory.draw_peaks(chosen.measured).records) == peak_memory.MAX_BARS
