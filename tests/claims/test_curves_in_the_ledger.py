"""Tests of the judge with constructed loss curves: distances from a reference curve, final losses, missing losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED
from repro.results.record_parts import StepSeries
from repro.results.schema import ExperimentRecord
from tests.claims.constructed_records import record
from tests.claims.test_judge import judged

STRAYED_ROW = (
    '{ label = "x", published = "3", bound = "at most", unit = "x", '
    'measured = { value = \'strayed("s/a", "s/one", "s/order")\' } },\n'
)
APART_ROW = (
    '{ label = "y", published = "1", bound = "at most", unit = "%", metric = "ratio", '
    'measured = { value = \'apart("s/a", "s/one")\', scale = "scaled twin" } },\n'
)


def curve(name: str, relative: float, steps: int = 100, outcome: str = "ok") -> ExperimentRecord:
    losses: list[float | None] = [2.0 * (1 + relative)] * steps
    return replace(record(name, outcome=outcome), series=StepSeries(loss=losses))


def verdicts(tmp_path: Path, *records: ExperimentRecord) -> list[str]:
    return [row.verdict for row in judged(tmp_path, STRAYED_ROW + APART_ROW, *records).rows]


def test_loss_curve_strays_at_most_three_times_the_controls(tmp_path: Path) -> None:
    known = curve("one", 0), curve("order", 1e-6)
    assert verdicts(tmp_path, *known, curve("a", 2.9e-6)) == [REPRODUCED, REPRODUCED]
    assert verdicts(tmp_path, *known, curve("a", 3.1e-6)) == [NOT_REPRODUCED, REPRODUCED]
    assert verdicts(tmp_path, *known, curve("a", -0.02)) == [NOT_REPRODUCED, NOT_REPRODUCED]


def test_curves_without_comparable_losses_are_not_run(tmp_path: Path) -> None:
    known = curve("one", 0), curve("order", 1e-6)
    for wrong, reason in (
        (curve("a", 0, steps=99), "the losses of all steps"),
        (record("a"), "the experiment's record has no losses"),
        (curve("a", 0, outcome="diverged"), "ended diverged"),
    ):
        first = judged(tmp_path, STRAYED_ROW + APART_ROW, *known, wrong).rows[0]
        assert first.verdict == NOT_RUN
        assert reason in first.reason
    assert verdicts(tmp_path, *known, curve("a", 0, steps=49))[1] == NOT_RUN


def test_two_comparisons_of_one_curve_are_one_quantity(tmp_path: Path) -> None:
    found = judged(tmp_path, STRAYED_ROW + APART_ROW, curve("one", 0), curve("order", 1e-6), curve("a", 0))
    assert count_independent([found])["measured"] == QuantityCounts(1, 1)
