"""A judged claim in one line, and what was counted in a sentence."""

from __future__ import annotations

from pathlib import Path

from repro.claims.table import summary, table, totals
from repro.claims.verdicts import NOT_COMPARABLE
from tests.claims.made_up import record
from tests.claims.test_judge import PUBLISHED, judged, row


def test_a_claim_in_one_line(tmp_path: Path) -> None:
    """What no expression tests says what is missing, unless nothing could test it."""
    (line,) = table([judged(tmp_path, row())])
    assert line.counts == {"analytic": "1/1", "simulated": "-", "emulated": "-", "measured": "not run"}
    (line,) = table([judged(tmp_path, row(PUBLISHED), record("full", speed=2.0))])
    assert (line.counts["measured"], line.scale) == ("1/1", "published scale")
    never = '{ label = "x", published = "2.0", not_comparable = "nobody says how" },\n'
    (line,) = table([judged(tmp_path, never)])
    assert (line.verdict, line.counts["measured"]) == (NOT_COMPARABLE, "-")


def test_totals_in_a_sentence(tmp_path: Path) -> None:
    assert totals(summary([judged(tmp_path, row())])) == (
        "1 independent things tested (1 analytic), 1 hold in all their values."
    )
    assert totals(summary([judged(tmp_path, row(analytic=""))])) == (
        "0 independent things tested (none), 0 hold in all their values."
    )
