"""Tests of the commands on unusual stores: empty, failures only, damaged lines, another protocol, many records."""

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
from tests.report.test_page import oversized_pages

COMMANDS = (
    ["claims"],
    ["claims", "--json"],
    ["claims", "zero-mem-formula-stages"],
    *(["export", "--table", table] for table in ("summary", "claims", "values", "experiments", "records")),
    ["validate"],
)


def write(root: Path, *texts: str | bytes) -> Path:
    folder = root / "results" / "records"
    folder.mkdir(parents=True)
    path = folder / "writer.jsonl"
    path.write_bytes(b"\n".join(t if isinstance(t, bytes) else t.encode() for t in texts) + b"\n")
    return path


def valid(**changes: Any) -> str:
    """Return the line of the first synthetic record with changed fields."""
    e = synthetic.experiments()[0]
    made = experiment_record(
        e, synthetic.results(e), suite="smoke", provenance=synthetic.PROVENANCE, wall_s=1
    )
    return json.dumps({**made.as_dict(), **changes})


def without(key: str) -> str:
    record = json.loads(valid())
    del record[key]
    return json.dumps(record)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("store", ["empty", "damaged"])
def test_commands_report_damaged_lines_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, command: list[str]
) -> None:
    """The damaged store also has one failure of each kind and a record of another protocol."""
    (tmp_path / "results").mkdir()
    if store == "damaged":
        none = {"metrics": {}, "series": {}, "memory_by_rank": []}
        kinds = ("hang", "error", "timeout", "oom", "diverged")
        failed = [valid(name=kind, outcome=kind, reason=f"it was {kind}", **none) for kind in kinds]
        damaged = ['{"kind": "experiment"', without("metrics")]
        write(tmp_path, valid(), *damaged, valid(protocol=PROTOCOL + 1), *failed)
    assert cli.main([*command, "--results", str(tmp_path / "results")]) == 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if store == "damaged":
        assert f"{tmp_path}/results/records/writer.jsonl:2: not a record, skipped" in err
        assert "writer.jsonl:3: metrics: missing in a record of kind experiment; skipped" in err


def test_invalid_lines_are_named_and_other_lines_are_read(tmp_path: Path) -> None:
    remarks: dict[str | bytes, str] = {
        "{": "not a record",
        b"\x00\xff\xfe": "not a record",
        "[" * 100_000: "not a record",
        "[1]": "not a record",
        "{}": "kind: must be one of experiment",
        without("metrics"): "metrics: missing in a record of kind experiment",
        valid(metrics=[]): "metrics: of another type in a record of kind experiment",
        valid(metrics={"step_seconds.median": float("nan")}): "not a record",
        valid(experiment={}): "experiment.model: missing in a record of kind experiment",
        '{"kind": "comparison"}': "suite: missing in a record of kind comparison",
    }
    path = write(tmp_path, valid(), *remarks, "", "  ", valid(name="after"))
    found = evidence.read_store(tmp_path / "results")
    assert [record.name for record in found.records] == ["states-z0-dp1", "after"]
    for number, (remark, message) in enumerate(zip(found.torn, remarks.values(), strict=True), 2):
        assert remark.startswith(f"{path}:{number}: {message}")


def test_page_reports_failures_invalid_lines_and_records_of_other_protocols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has no conclusive record. The page has no figures, which would take most of its time."""
    monkeypatch.setattr("repro.report.figures.draw_all", lambda *of: [])
    others = [valid(protocol=protocol, name="of-another-protocol") for protocol in (PROTOCOL + 1, None)]
    kinds = ("hang", "error", "timeout")
    failed = [valid(name=k, outcome=k, reason=f"it was {k}", metrics={}, series={}) for k in kinds]
    path = write(tmp_path, *["{"] * 25, *others, *failed)
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert report.remarks[0] == f"{path}:1: not a record, skipped"
    assert report.remarks[10:12] == [
        "15 more lines of the store are not records",
        "2 records of another version of the measurement protocol are omitted, because they are not comparable",
    ]
    assert f"{path}:1: not a record" in report.page.read_text()
    assert any("without a conclusive result: smoke/error (error)" in remark for remark in report.remarks)
    data = (tmp_path / "out/records.js").read_text()
    assert ("it was timeout" in data, "of-another-protocol" in data) == (True, False)
    assert report.experiments == 3
    assert report.verdicts["reproduced"] > 0  # closed forms need no record
    judged = evidence.read_store(tmp_path / "results").provenance()["judged"]
    assert list(judged) == [False, False, True, True, True]


@pytest.mark.slow
def test_a_large_store_has_pages_below_the_limits(tmp_path: Path) -> None:
    """The store has 2,100 records and no figures; `make benchmarks` measures 10,000 records with figures."""
    found = evidence.read_store(large.store(tmp_path / "results", 2_100))
    assert len(found.records) == 2_100
    chosen = select(found.records)
    assert min(len(chosen.measured), len(chosen.simulated)) > 2 * MAX_RECORDS
    values = context.context(found, chosen, [], [], SuiteCatalogue())
    site = context.render_site({**values, "notebooks": []})
    assert list(oversized_pages(site)) == []
    text = site["experiments.html"]
    assert "that no claim and no figure reads are not listed here" in text
    assert "repro export --table experiments --format csv" in text
    with figure_style():
        assert len(peak_memory.draw_peaks(chosen.measured).records) == peak_memory.MAX_BARS
