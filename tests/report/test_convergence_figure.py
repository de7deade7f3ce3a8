"""Tests of the figure of loss curves: loss distances, categories of runs, and the command for missing records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic

from repro.report.figures import loss_curves
from repro.report.figures.style import figure_style
from repro.results.measured import experiment_record

STEPS = 40
SHIFTS = {
    "fp32": 0.0,
    "order-unfused": 2e-6,
    "order-4-micro-batches": 1e-6,
    "fault-rate": 1e-3,
    "seed-1": 0.1,
    "batch-32": 0.5,
}
LAYOUTS: dict[str, tuple[float, dict[str, Any]]] = {
    "z2-dp2": (3e-6, {"zero": 2, "dp": 2}),
    "tp2": (4e-6, {"tp": 2}),
    "pp2": (5e-6, {"pp": 2}),
    "tp2-dp2": (6e-6, {"tp": 2, "dp": 2}),
    "fp16": (0.01, {"precision": "fp16"}),
}


def record(name: str, shift: float, engine: str = "native", **layout: Any) -> Any:
    made = replace(synthetic.experiment(name, **layout), engine=engine)
    found = experiment_record(
        made, synthetic.results(made), wall_s=1.0, suite="convergence", provenance=synthetic.PROVENANCE
    )
    losses = [2.0 * (1 + shift)] * STEPS
    return replace(found, series=replace(found.series, loss=losses))


def records() -> list[Any]:
    made = [record(name, shift) for name, shift in SHIFTS.items()]
    made += [record(name, shift, **layout) for name, (shift, layout) in LAYOUTS.items()]
    return [*made, record("deepspeed-z1-dp2", 7e-6, "deepspeed", zero=1, dp=2)]


def drawn(found: list[Any]) -> Any:
    with figure_style():
        return loss_curves.draw_convergence(found)


def final_values(axes: Any) -> dict[str, float]:
    """Return the last value of the first line of each label."""
    found: dict[str, float] = {}
    for line in axes.lines:
        found.setdefault(line.get_label(), line.get_ydata()[-1])
    return found


def test_lines_end_at_their_loss_distance_from_one_process() -> None:
    drawing = drawn(records())
    left, middle, right = drawing.figure.axes
    kinds = [3e-6, 4e-6, 5e-6, 6e-6, 7e-6]
    expected = dict(zip(loss_curves.LAYOUT_COLOURS, kinds, strict=True))
    assert {kind: final_values(middle)[kind] for kind in expected} == pytest.approx(expected)
    assert [note.get_text() for note in middle.texts] == ["rate + 0.01 %"]
    assert final_values(right) == pytest.approx({"other seeds": 0.1, "fp16": 0.01})
    assert final_values(left)["fp16, bf16"] == pytest.approx(2.02)
    (band,) = middle.collections
    assert sorted({*band.get_paths()[0].vertices[:, 1]}) == pytest.approx([1e-6, 2e-6])
    assert drawing.missing == ""
    assert "convergence/batch-32" not in drawing.records
    assert "5 layouts in fp32 and 1 in fp16 or bf16" in drawing.caption
    assert (
        "any step: 7.0e-06 of an fp32 layout, 2.0e-06 of one process with another summation order"
        in drawing.caption
    )


def test_figure_needs_the_one_process_run_and_its_controls() -> None:
    for prefix in ("fp32", "order-"):
        drawing = drawn([one for one in records() if not one.name.startswith(prefix)])
        assert drawing.figure is None
        assert drawing.missing == loss_curves.CONVERGENCE.missing


def test_failed_runs_and_incomplete_losses_are_omitted() -> None:
    incomplete = [
        replace(one, series=replace(one.series, loss=[None, *(one.series.loss or [])[1:]]))
        if one.name == "fp16"
        else replace(one, outcome="oom")
        if one.name == "pp2"
        else one
        for one in records()
    ]
    drawing = drawn(incomplete)
    assert not {"convergence/fp16", "convergence/pp2"} & {*drawing.records}
    assert drawing.missing == loss_curves.CONVERGENCE.missing, "no run in 16 bits has all losses"


def test_records_of_other_suites_are_ignored() -> None:
    assert drawn([replace(one, suite="mine") for one in records()]).figure is None
