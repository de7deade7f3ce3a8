"""Tests of the coverage of intervals: conformal margins with values by hand, and `repro validate --covered`."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import cli
from repro.accuracy.validate.published import (
    ALL_RATES,
    RATIOS,
    FamilyStatistics,
    Residual,
    conformal_margin,
    conformal_margins,
    conformity_score,
)
from repro.report.text import validate as view

MIN_PERCENT, MAX_PERCENT = 80.0, 97.0


def family(name: str, held: int, wider: int = 100) -> FamilyStatistics:
    worst: Any = None
    counts = {"points": wider, "close": 0, "held": 0, "wider": wider, "held_wider": held}
    return FamilyStatistics(name=name, median=0.1, worst=worst, **counts)


def test_rates_and_ratios_must_both_be_in_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rates, ratios, code in ((80, 97, 0), (92, 79, 1), (98, 90, 1), (79, 98, 1), (100, 100, 1)):
        found = [family("V100", 0), family(ALL_RATES, rates), family(RATIOS, ratios)]
        monkeypatch.setattr(view.published, "family_statistics", lambda points, found=found: found)
        assert view.print_coverage(tmp_path, (MIN_PERCENT, MAX_PERCENT)) == code
        output = " ".join(capsys.readouterr().out.split())
        answer = f"{rates} of 100 rates and {ratios} of 100 ratios lie in their widened 90 % intervals"
        assert output.startswith(answer)
        assert ("not both between 80 and 97 %" in output) == bool(code)


RANGE = "two percentages between 0 and 100, the smaller one first"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("80 97", 1, "The results folder has too few predictions"),
        ("97 80", 2, RANGE),
        ("-1 50", 2, RANGE),
        ("80 101", 2, RANGE),
        ("80 97 --unknowns", 2, "cannot be combined with --svg"),
    ],
)
def test_empty_store_invalid_range_or_another_option_fails(
    words: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", *words.split()]) == code
    streams = capsys.readouterr()
    assert message in " ".join((streams.out if code == 1 else streams.err).split())


ROWS = st.tuples(st.sampled_from("ABC"), st.floats(-1, 1), st.sampled_from("abcdef"))


def residual(report: str, value: float, run: str = "", kind: str = "rate") -> Residual:
    return Residual(kind, frozenset({report}), frozenset({run} if run else ()), value)


def test_margin_is_the_90_percent_quantile_of_log_distances() -> None:
    """The margin is the 9th of 9 scores, ceil(10 x 0.9), and the 18th of 19; of 8 scores, the 9th does not exist."""
    for published, distance in ((40, log(2)), (5, log(2)), (12, -log(1.2))):  # negative inside the interval
        assert conformity_score(10, 20, published) == pytest.approx(distance)
    assert conformal_margin([0.1 * n for n in range(1, 10)]) == pytest.approx(0.9)
    assert conformal_margin([0.1 * n for n in range(19, 0, -1)]) == pytest.approx(1.8)
    assert conformal_margin([0.1] * 8) is conformal_margin([]) is None
    assert conformal_margin([-0.3] * 9) == 0.0, "a margin must not narrow an interval"
    assert conformal_margins([residual("A", 0.1)] * 50) == [None] * 50, "other reports are necessary"


@settings(max_examples=50)
@given(st.lists(ROWS, min_size=12, max_size=40), st.floats(5, 10))
def test_margin_ignores_the_same_report_and_runs(rows: list[tuple[str, float, str]], far: float) -> None:
    """Scores of the row's report, and of its runs in other reports, do not change the margin."""
    residuals = [residual(*row) for row in rows]
    row = residuals[0]
    changed = [
        one if one.apart(row) else replace(one, score=far if number % 2 else -far)
        for number, one in enumerate(residuals)
    ]
    assert conformal_margins(residuals)[0] == conformal_margins(changed)[0]
    others = [replace(one, score=far) if one.apart(row) else one for one in residuals]
    if (found := conformal_margins(others)[0]) is not None:
        assert found == far, "scores of other reports must count"


def test_margin_ignores_both_reports_of_a_row_and_the_other_kind() -> None:
    """Rates and ratios have separate margins."""
    others = [residual("C", 0.1) for _ in range(9)]
    both = Residual("rate", frozenset({"A", "B"}), frozenset(), 0.0)
    assert conformal_margins([both, residual("B", 5.0), residual("A", 5.0), *others])[0] == pytest.approx(0.1)
    ratios = [residual("C", 0.7, kind="ratio") for _ in range(9)]
    found = conformal_margins([residual("B", 0.0), residual("B", 0.0, kind="ratio"), *others, *ratios])
    assert found[:2] == [0.1, 0.7]


def test_margins_cover_90_percent_of_similar_reports() -> None:
    """Without margins, the intervals cover less than 30 %. Errors have one distribution in all reports."""
    random = Random(0)
    rows = []
    for number in range(2000):
        predicted = exp(random.gauss(0, 0.1))
        rows.append((f"report {number % 20}", conformity_score(0.98 * predicted, 1.02 * predicted, 1.0)))
    found = conformal_margins([residual(report, value) for report, value in rows])
    covered = sum(value <= (margin or 0.0) for (_, value), margin in zip(rows, found, strict=True))
    assert sum(value <= 0 for _, value in rows) < 600
    assert covered / len(rows) == pytest.approx(0.9, abs=0.01)
