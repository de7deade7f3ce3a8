"""Tests of the texts for the results of a claim and for the totals of all claims."""

from __future__ import annotations

from pathlib import Path

from repro.claims.ledger import KINDS
from repro.claims.table import count_text, totals
from repro.claims.verdicts import NOT_COMPARABLE
from repro.results.schema import MEASURED
from tests.claims.constructed_records import record
from tests.claims.test_judge import PUBLISHED, TWIN, judged, row


def test_count_text_of_a_claim_by_kind_of_evidence(tmp_path: Path) -> None:
    """Measured evidence is "not run" without an expression if the claim names needed hardware and is comparable."""
    counts = [count_text(judged(tmp_path, row()), kind) for kind in KINDS]
    assert counts == ["-", "-", "-", "not run"]
    assert count_text(judged(tmp_path, row(PUBLISHED), record("full", speed=2.0)), MEASURED) == "1/1"
    incomparable = '{ label = "x", published = "2.0", not_comparable = "nobody says how" },\n'
    result = judged(tmp_path, incomparable)
    assert (result.verdict, count_text(result, MEASURED)) == (NOT_COMPARABLE, "-")


def test_totals_count_values_by_kind_and_verdict(tmp_path: Path) -> None:
    rows = row(label="a") + row(label="b", analytic="") + row(PUBLISHED, label="c") + row(TWIN, label="d")
    assert totals([judged(tmp_path, rows, record("full", speed=2.0))]) == (
        "4 values: 0 simulated, 0 emulated, 1 measured, 0 counted: 1 agree (0 weak), 0 miss, 0 undecided. "
        "No tests: 1 follow from formulas, 0 contradict them, 1 not run, 1 without a test."
    )
