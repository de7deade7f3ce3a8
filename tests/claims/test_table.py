"""A judged claim in one line, and what was counted in a sentence."""

from __future__ import annotations

from pathlib import Path

from repro.claims.ledger import KINDS
from repro.claims.table import count_text, summary, totals
from repro.claims.verdicts import NOT_COMPARABLE
from repro.results.schema import MEASURED
from tests.claims.made_up import record
from tests.claims.test_judge import PUBLISHED, judged, row


def test_a_claim_in_one_line(tmp_path: Path) -> None:
    """What no expression tests says what is missing, unless nothing could test it."""
    counts = [count_text(judged(tmp_path, row()), kind) for kind in KINDS]
    assert counts == ["1/1", "-", "-", "not run"]
    assert count_text(judged(tmp_path, row(PUBLISHED), record("full", speed=2.0)), MEASURED) == "1/1"
    never = '{ label = "x", published = "2.0", not_comparable = "nobody says how" },\n'
    result = judged(tmp_path, never)
    assert (result.verdict, count_text(result, MEASURED)) == (NOT_COMPARABLE, "-")


def test_totals_in_a_sentence(tmp_path: Path) -> None:
    assert totals(summary([judged(tmp_path, row())])) == (
        "1 independent quantities tested (1 analytic): 1 agree in all values, 0 are possible."
    )
    assert totals(summary([judged(tmp_path, row(analytic=""))])) == (
        "0 independent quantities tested (none): 0 agree in all values, 0 are possible."
    )
