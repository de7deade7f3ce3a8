"""What the ledger says of loss curves: of made-up ones that stray, end apart or have not been run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED
from repro.results.record_parts import StepSeries
from repro.results.schema import ExperimentRecord
from tests.claims.made_up import record
from tests.claims.test_judge import judged

STRAYED = (
    '{ label = "x", published = "3", bound = "at most", unit = "x", '
    'measured = { value = \'strayed("s/a", "s/one", "s/order")\' } },\n'
)
APART = (
    '{ label = "y", published = "1", bound = "at most", unit = "%", metric = "ratio", '
    'measured = { value = \'apart("s/a", "s/one")\', scale = "scaled twin" } },\n'
)


def curve(name: str, relative: float, steps: int = 100, outcome: str = "ok") -> ExperimentRecord:
    losses: list[float | None] = [2.0 * (1 + relative)] * steps
    return replace(record(name, outcome=outcome), series=StepSeries(loss=losses))


def verdicts(tmp_path: Path, *records: ExperimentRecord) -> list[str]:
    return [row.verdict for row in judged(tmp_path, STRAYED + APART, *records).rows]


def test_a_curve_that_strays_no_further_than_so_many_controls(tmp_path: Path) -> None:
    known = curve("one", 0), curve("order", 1e-6)
    assert verdicts(tmp_path, *known, curve("a", 2.9e-6)) == [REPRODUCED, REPRODUCED]
    assert verdicts(tmp_path, *known, curve("a", 3.1e-6)) == [NOT_REPRODUCED, REPRODUCED]
    assert verdicts(tmp_path, *known, curve("a", -0.02)) == [NOT_REPRODUCED, NOT_REPRODUCED]


def test_what_cannot_be_compared_is_not_run_and_says_why(tmp_path: Path) -> None:
    known = curve("one", 0), curve("order", 1e-6)
    for wrong, why in (
        (curve("a", 0, steps=99), "the losses of all steps"),
        (record("a"), "the experiment's record has no losses"),
        (curve("a", 0, outcome="diverged"), "ended diverged"),
    ):
        first = judged(tmp_path, STRAYED + APART, *known, wrong).rows[0]
        assert first.verdict == NOT_RUN
        assert why in first.reason
    assert verdicts(tmp_path, *known, curve("a", 0, steps=49))[1] == NOT_RUN


def test_a_curve_is_one_thing_however_it_is_held_against_others(tmp_path: Path) -> None:
    found = judged(tmp_path, STRAYED + APART, curve("one", 0), curve("order", 1e-6), curve("a", 0))
    assert count_independent([found])["measured"] == QuantityCounts(1, 1)
