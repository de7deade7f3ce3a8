"""What published values need of an unknown: inverted by hand, and rows that no single value serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.accuracy.validate.implied_inputs import ImpliedInput, find_implied_inputs
from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.config.systems.unknowns import PACE
from repro.report.figures import validation as figure
from repro.report.figures.style import figure_style
from repro.results.interval import Other, Sensitivity, StepInterval
from repro.results.schema import ExperimentRecord
from tests.accuracy.validate.steps import RINGS, judged, on
from tests.claims.test_judge import HEAD
from tests.records import changed


def moving(
    name: str, seconds: dict[float, float], key: str = RINGS, system: str = "dgx2"
) -> ExperimentRecord:
    """A step that takes so many seconds by the value of one unknown, 10 s at its best value 2 of 1 to 4."""
    curve = [[value, took] for value, took in seconds.items()]
    move = Sensitivity(key=key, low=1, best=2, high=4, low_s=seconds[1], high_s=seconds[4], curve=curve)
    interval = StepInterval(draws=[10.0] * 4, moves=[move])
    return changed(on(system, name), interval=interval.as_dict())


INVERSE = {0.25: 80.0, 0.5: 40.0, 1: 20.0, 2: 10.0, 4: 5.0, 8: 2.5, 16: 1.25}
"""100 samples: a rate of 5 for each ring."""


def needed(path: Path, rows: dict[str, str], *records: ExperimentRecord) -> list[ImpliedInput]:
    return find_implied_inputs(judged(path, rows, *records), records)


def test_the_value_at_which_a_prediction_is_what_was_published(tmp_path: Path) -> None:
    """15.0/s needs 3 rings, in the range; 60/s needs 12, beyond it; each 15 % to either side."""
    (found,) = needed(tmp_path, {"a": "15.0", "b": "60.0"}, moving("a", INVERSE), moving("b", INVERSE))
    assert (found.key, found.system, found.searched) == (RINGS, "dgx2", (0.25, 16))
    a, b = found.needs
    assert a.value == pytest.approx(3)
    assert (a.low, a.high) == pytest.approx((3 * 0.85, 3 * 1.15))
    assert b.value == pytest.approx(12)
    assert found.unserved == ()
    assert found.contradiction == (b, a), "no value is within 15 % of both"
    assert "a-claim/b needs 10.2 or more, a-claim/a needs 3.45 or less" in found.words
    assert "contradict each other, or the model is wrong" in found.words


def test_rows_that_one_value_serves_do_not_contradict_each_other(tmp_path: Path) -> None:
    (found,) = needed(tmp_path, {"a": "15.0", "b": "17.0"}, moving("a", INVERSE), moving("b", INVERSE))
    assert found.contradiction is None
    assert "contradict" not in found.words
    # 17 needs 3.4 rings, and 15 % less are enough; 15 needs 3, and is served by 15 % more.
    assert f"; {3.4 * 0.85:.3g} to {3 * 1.15:.3g} fits all." in found.words


def test_a_row_that_no_value_serves_is_named_and_contradicts_none(tmp_path: Path) -> None:
    (found,) = needed(tmp_path, {"a": "15.0", "b": "500"}, moving("a", INVERSE), moving("b", INVERSE))
    assert [(need.row, need.value, need.low) for need in found.unserved] == [("a-claim/b", None, None)]
    assert found.contradiction is None
    assert "no value from 0.25 to 16 fits 1 rows (a-claim/b)" in found.words


def test_clusters_are_apart_and_an_unknown_that_moves_little_says_nothing(tmp_path: Path) -> None:
    little = Sensitivity(
        key=PACE, low=1, best=2, high=4, low_s=10.0, high_s=10.5, curve=[[1, 10.0], [4, 10.5]]
    )
    both = moving("a", INVERSE)
    assert both.interval is not None
    both = changed(both, interval=replace(both.interval, moves=[*both.interval.moves, little]).as_dict())
    other = moving("b", INVERSE, system="selene")
    found = needed(tmp_path, {"a": "15.0", "b": "60.0"}, both, other)
    assert {(one.key, one.system) for one in found} == {(RINGS, "dgx2"), (RINGS, "selene")}
    assert all(one.contradiction is None for one in found)


def test_a_ratio_is_taken_with_the_same_value_on_both_sides(tmp_path: Path) -> None:
    """Over a step that rings do not move: the ratio is their number over 2."""
    value = 'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")'
    row = f"""{{ label = "x", published = "3.0", simulated = {{ value = '{value}' }} }}"""
    (tmp_path / "claims.toml").write_text(HEAD + row + "]\n")
    records = moving("a", INVERSE), moving("b", dict.fromkeys(INVERSE, 10.0) | {1: 10.1})
    (found,) = find_implied_inputs(judge(load_ledger(tmp_path), records), records)
    assert found.needs[0].value == pytest.approx(6, rel=1e-6)


def test_rows_that_most_others_disagree_with_are_torn(tmp_path: Path) -> None:
    rows = {"a": "15.0", "b": "17.0", "c": "60.0", "d": "500"}
    (found,) = needed(tmp_path, rows, *(moving(name, INVERSE) for name in rows))
    assert found.torn == 1, "a and b agree, c does not; d is served by no value"


def test_the_figure_shows_what_most_rows_are_torn_about_and_never_the_pace(tmp_path: Path) -> None:
    agree = needed(tmp_path, {"a": "15.0"}, moving("a", INVERSE, key="links.nvlink.efficiency"))
    torn = needed(tmp_path, {"a": "15.0", "b": "60.0"}, moving("a", INVERSE), moving("b", INVERSE))
    pace = needed(tmp_path, {"a": "15.0"}, moving("a", INVERSE, key=PACE, system="selene"))
    assert figure.select_implied([*pace, *agree, *torn]) == [*torn, *agree]


def test_between_the_points_of_a_curve() -> None:
    move = Sensitivity(
        key=RINGS, low=1, best=2, high=4, low_s=20, high_s=5, curve=[[1, 20.0], [2, 10.0], [4, 5.0]]
    )
    interval = StepInterval(draws=[], moves=[move])
    assert interval.seconds_in(Other(RINGS, 3.0), 10.0) == pytest.approx(20 / 3)
    assert interval.seconds_in(Other(RINGS, 100.0), 10.0) == pytest.approx(5), "no further than it was timed"
    assert interval.seconds_in(Other(PACE, 3.0), 10.0) == 10.0, "another unknown"


def test_the_figure_has_a_panel_for_each_and_marks_who_contradicts(tmp_path: Path) -> None:
    records = moving("a", INVERSE), moving("b", INVERSE)
    found = needed(tmp_path, {"a": "15.0", "b": "60.0"}, *records)
    with figure_style():
        drawing = figure.draw_implied(found)
    assert drawing.figure is not None
    (axes,) = drawing.figure.axes
    assert axes.get_title(loc="left") == f"{RINGS} of dgx2"
    dots = {line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    assert sorted(dots) == pytest.approx([3, 12])
    assert axes.get_xscale() == "log"
    with figure_style():
        assert figure.draw_implied([]).missing
