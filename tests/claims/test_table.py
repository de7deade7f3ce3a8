"""Tests of the texts for the results of a claim and for the totals of all claims."""

from __future__ import annotations

from pathlib import Path

from repro.claims.judge import judge
from repro.claims.ledger import KINDS
from repro.claims.table import count_text, totals, why
from repro.claims.verdicts import NOT_COMPARABLE
from repro.results.schema import MEASURED
from tests import committed
from tests.claims.constructed_records import judged, record, row
from tests.claims.test_judge import FORMULA, PUBLISHED, TWIN


def test_count_text_of_a_claim_by_kind_of_evidence(tmp_path: Path) -> None:
    """Measured evidence is "not run" without an expression if the claim names needed hardware and is comparable."""
    result = judged(tmp_path, row(analytic=FORMULA))
    assert [count_text(result, kind) for kind in KINDS] == ["-", "-", "-", "not run"]
    result = judged(tmp_path, row(measured=PUBLISHED), record("full", speed=2.0))
    assert count_text(result, MEASURED) == "1/1"
    result = judged(tmp_path, row(not_comparable='"nobody says how"'))
    assert (result.verdict, count_text(result, MEASURED)) == (NOT_COMPARABLE, "-")


def test_totals_count_values_by_kind_and_verdict(tmp_path: Path) -> None:
    rows = row(label="a", analytic=FORMULA) + row(label="b")
    rows += row(label="c", measured=PUBLISHED) + row(label="d", measured=TWIN)
    assert totals([judged(tmp_path, rows, record("full", speed=2.0))]) == (
        "4 values: 0 simulated, 0 emulated, 1 measured, 0 counted: 1 agree (0 weak), 0 miss, 0 undecided. "
        "No tests: 1 follow from formulas, 0 contradict them, 1 not run, 1 without a test."
    )


def test_every_verdict_has_an_explanation_in_one_line(tmp_path: Path) -> None:
    explanation = why(judged(tmp_path, row("3", analytic='"dp_elements(1.5)"')))
    assert explanation.startswith("The only value agrees with the formula of the source. ")
    for result in judge(committed.ledger(), []):
        assert why(result).endswith(".")
        assert "\n" not in why(result)
