"""Tests of values of an unknown that published rates imply, and of rows that share no value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.accuracy.validate.implied_inputs import ImpliedInput, find_implied_inputs
from repro.claims.judge import judge
from repro.claims.verdicts import ClaimResult
from repro.config import Experiment, Layout, Model, OperatorSet
from repro.config.systems.unknowns import PACE
from repro.report.figures import validation as figure
from repro.report.figures.style import figure_style
from repro.results.interval import Other, Sensitivity, StepInterval
from repro.results.schema import ExperimentRecord
from tests.claims.constructed_records import RATIO, judged, row, value, write_ledger
from tests.claims.test_possible import rate, simulated
from tests.records import changed

MODEL = Model(name="m", layers=2, hidden=32, heads=2, vocab=256, seq=32)
RINGS = "links.inter-node.rings"


def step_record(system: str, name: str, **moves: tuple[float, float]) -> ExperimentRecord:
    """Return a step of 10 s and 100 samples on `system`; `moves` has its seconds at both ends of an unknown."""
    keys = {"rings": RINGS, "pace": PACE}
    sensitivities = [
        Sensitivity(key=keys[key], low=1, best=2, high=3, low_s=low, high_s=high)
        for key, (low, high) in moves.items()
    ]
    record = simulated(f"s/{name}", 10.0, StepInterval(draws=[10.0] * 4, moves=sensitivities))
    layout = Layout(precision="fp16", kernels=OperatorSet.UNFUSED)
    experiment = Experiment(name=name, model=MODEL, layout=layout, system=system)
    return changed(record, experiment=experiment.as_dict(), key=experiment.key)


def judge_rates(path: Path, published: dict[str, str], *records: ExperimentRecord) -> list[ClaimResult]:
    """Judge one row per published rate of a step, in samples per second."""
    rows = "".join(
        row(number, name, unit='"samples/s"', simulated=rate(f"s/{name}"))
        for name, number in published.items()
    )
    return judge(write_ledger(path, rows), records)


def with_curve(
    name: str, seconds: dict[float, float], key: str = RINGS, system: str = "dgx2"
) -> ExperimentRecord:
    """Return a step with seconds by the value of one unknown, which are 10 s at its best value 2 in 1 to 4."""
    curve = [[value, step_s] for value, step_s in seconds.items()]
    move = Sensitivity(key=key, low=1, best=2, high=4, low_s=seconds[1], high_s=seconds[4], curve=curve)
    interval = StepInterval(draws=[10.0] * 4, moves=[move])
    return changed(step_record(system, name), interval=interval.as_dict())


CURVE = {0.25: 80.0, 0.5: 40.0, 1: 20.0, 2: 10.0, 4: 5.0, 8: 2.5, 16: 1.25}
"""Seconds of 100 samples by number of rings, at 5 samples/s per ring."""


def implied(path: Path, rows: dict[str, str], *records: ExperimentRecord) -> list[ImpliedInput]:
    """Return the values that published rates imply; without `records`, all steps have the curve `CURVE`."""
    records = records or tuple(with_curve(name, CURVE) for name in rows)
    return find_implied_inputs(judge_rates(path, rows, *records), records)


def test_implied_value_predicts_the_published_rate(tmp_path: Path) -> None:
    """15.0/s needs 3 rings, inside the range; 60/s needs 12 rings, outside. The tolerance is 15 %."""
    (found,) = implied(tmp_path, {"a": "15.0", "b": "60.0"})
    assert (found.key, found.system, found.searched) == (RINGS, "dgx2", (0.25, 16))
    assert found.unserved == ()
    a, b = found.needs
    assert a.value == pytest.approx(3)
    assert (a.low, a.high) == pytest.approx((3 * 0.85, 3 * 1.15))
    assert b.value == pytest.approx(12)
    assert found.contradiction == (b, a), "no value is within 15 % of both"
    assert "a-claim/b needs 10.2 or more, a-claim/a needs 3.45 or less" in found.words
    assert "contradict each other, or the model is wrong" in found.words


def test_rows_with_a_common_value_do_not_contradict(tmp_path: Path) -> None:
    (found,) = implied(tmp_path, {"a": "15.0", "b": "17.0"})
    assert found.contradiction is None
    assert "contradict" not in found.words
    # 17 needs 3.4 rings or up to 15 % less; 15 needs 3 rings or up to 15 % more.
    assert f"; an input value from {3.4 * 0.85:.3g} to {3 * 1.15:.3g} fits all rows." in found.words


def test_row_without_a_value_is_named_and_contradicts_none(tmp_path: Path) -> None:
    (found,) = implied(tmp_path, {"a": "15.0", "b": "500"})
    assert [(need.row, need.value, need.low) for need in found.unserved] == [("a-claim/b", None, None)]
    assert found.contradiction is None
    assert "no input value from 0.25 to 16 fits 1 row (a-claim/b)" in found.words
    (found,) = implied(tmp_path, {"a": "15.0", "b": "17.0", "c": "60.0", "d": "500"})
    assert found.torn == 1, "a and b agree, c disagrees; no value fits d"


def test_systems_are_separate_and_weak_unknowns_are_ignored(tmp_path: Path) -> None:
    weak = Sensitivity(key=PACE, low=1, best=2, high=4, low_s=10.0, high_s=10.5, curve=[[1, 10.0], [4, 10.5]])
    both = with_curve("a", CURVE)
    assert both.interval is not None
    both = changed(both, interval=replace(both.interval, moves=[*both.interval.moves, weak]).as_dict())
    other = with_curve("b", CURVE, system="selene")
    found = implied(tmp_path, {"a": "15.0", "b": "60.0"}, both, other)
    assert {(one.key, one.system) for one in found} == {(RINGS, "dgx2"), (RINGS, "selene")}
    assert all(one.contradiction is None for one in found)


def test_ratio_uses_one_value_for_both_steps(tmp_path: Path) -> None:
    """Rings do not change the second step, so that the ratio is half the number of rings."""
    records = with_curve("a", CURVE), with_curve("b", dict.fromkeys(CURVE, 10.0) | {1: 10.1})
    result = judged(tmp_path, row("3.0", simulated=value(RATIO)), *records)
    (found,) = find_implied_inputs([result], records)
    assert found.needs[0].value == pytest.approx(6, rel=1e-6)


def test_curve_is_interpolated_between_its_points() -> None:
    interval = with_curve("a", {1: 20.0, 2: 10.0, 4: 5.0}).interval
    assert interval is not None
    (move,) = interval.moves
    assert move.span == replace(move, low_s=5.0, high_s=20.0).span == 15
    assert interval.seconds_in(Other(RINGS, 3.0), 10.0) == pytest.approx(20 / 3)
    assert interval.seconds_in(Other(RINGS, 100.0), 10.0) == pytest.approx(5), "no extrapolation"
    assert interval.seconds_in(Other(PACE, 3.0), 10.0) == 10.0, "another unknown has no effect"


def test_figure_has_a_panel_with_all_implied_values(tmp_path: Path) -> None:
    """Panels are ordered by torn rows, and the pace has no panel."""
    torn = implied(tmp_path, {"a": "15.0", "b": "60.0"})
    agree = implied(tmp_path, {"a": "15.0"}, with_curve("a", CURVE, key="links.nvlink.efficiency"))
    pace = implied(tmp_path, {"a": "15.0"}, with_curve("a", CURVE, key=PACE, system="selene"))
    assert figure.select_implied([*pace, *agree, *torn]) == [*torn, *agree]
    with figure_style():
        drawing = figure.draw_implied(torn)
        assert figure.draw_implied([]).missing
    assert drawing.figure is not None
    (axes,) = drawing.figure.axes
    assert (axes.get_title(loc="left"), axes.get_xscale()) == (f"{RINGS} of dgx2", "log")
    dots = {line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    assert sorted(dots) == pytest.approx([3, 12])
