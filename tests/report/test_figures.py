"""Tests of figures of measured records: their values, the list of their records, and missing records."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from repro.report.figures import draw_all, loss_curves, peak_memory, zero_stages
from repro.report.figures.style import CATEGORY_COLOURS, Drawing, make_axes, to_svg
from repro.report.views import Machines, record_row
from repro.results.measured import experiment_record
from repro.results.select import select
from tests.records import changed
from tests.report import synthetic

pytestmark = pytest.mark.usefixtures("report_style")


@pytest.fixture(scope="module")
def measured() -> Any:
    return select(synthetic.records()).measured


def test_bars_are_measured_model_states_and_markers_the_formula(measured: Any) -> None:
    drawing = zero_stages.draw_measured_states(measured)
    axes = drawing.figure.axes[0]
    metrics = {r.name: r.metrics for r in measured}
    tops: dict[float, float] = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    names = [f"states-z{z}-dp{n}" for n in (1, 2, 4) for z in range(4)]
    states = [metrics[name]["memory.states_bytes"] / synthetic.PSI for name in names]
    assert [tops[x] for x in sorted(tops)] == pytest.approx(states)
    formula = [line.get_ydata()[0] for line in axes.lines]
    assert formula == [16, 16, 16, 16, 16, 10, 9, 8, 16, 7, 5.5, 4]
    assert (len(drawing.records), drawing.missing) == (12, "")
    some = [r for r in measured if r.name in ("states-z0-dp2", "states-z1-dp2")]
    incomplete = zero_stages.draw_measured_states(some)
    assert incomplete.figure is not None
    assert set(incomplete.records) == {"smoke/states-z0-dp2", "smoke/states-z1-dp2"}
    assert incomplete.missing == zero_stages.MEASURED_STATES.missing


def test_communication_is_relative_to_plain_data_parallelism(measured: Any) -> None:
    axes = zero_stages.draw_volume(measured).figure.axes[0]
    heights = sorted(bar.get_height() for bars in axes.containers for bar in bars)
    assert heights == pytest.approx([1, 1, 1, 1, 1, 1, 1.5, 1.5, 1.5, 1.5])
    without_base = [r for r in measured if r.name != "states-z0-dp2"]
    (bars,) = zero_stages.draw_volume(without_base).figure.axes[0].containers
    assert len(bars) == 5


def test_loss_figure_needs_the_single_process_run_and_reports_nan_losses(measured: Any) -> None:
    by_name = {r.name: r for r in measured}
    series = by_name["parity-z1-dp2"].series
    with_nan = replace(by_name["parity-z1-dp2"], series=replace(series, loss=[*series.loss[:-1], None]))
    drawing = loss_curves.draw_parity([*{**by_name, with_nan.name: with_nan}.values()])
    drawing.figure.canvas.draw()
    assert len(drawing.records) == 11
    assert "10 strategies" in drawing.caption
    assert "1 loss values were NaN" in drawing.caption
    assert "NaN" not in loss_curves.draw_parity(measured).caption
    without = [r for r in measured if r.name != loss_curves.SINGLE_PROCESS]
    assert loss_curves.draw_parity(without).figure is None


def test_peaks_are_those_of_the_fullest_rank_and_need_memory_categories(measured: Any) -> None:
    first = measured[0]
    small = first.memory_by_rank[0]
    large = replace(small, peak={**small.peak, "total": small.peak["total"] + 1})
    assert peak_memory.peak_of_fullest_rank(replace(first, memory_by_rank=[small, large])) == large.peak
    assert set(CATEGORY_COLOURS) | {"total"} == set(small.peak)
    known = {name: value for name, value in first.metrics.items() if name != "memory.activations_bytes"}
    foreign = replace(first, name="speed-torch-z0-dp2", metrics=known)
    drawing = peak_memory.draw_peaks([*measured, foreign])
    assert "smoke/speed-torch-z0-dp2" not in drawing.records
    assert "Omitted: 1 experiments" in drawing.caption
    assert record_row(foreign)["peak_gb"] == record_row(first)["peak_gb"] is not None
    on_gpu = replace(first, metrics={**first.metrics, "memory.context_bytes": 1.5e9})
    outside = [record_row(one)["facts"]["GPU memory outside torch's allocator"] for one in (first, on_gpu)]
    assert outside == ["", "1.5 GB"]


def test_failed_records_are_not_drawn(measured: Any) -> None:
    failed = [r for r in measured if r.outcome != "ok"]
    assert failed
    assert all(drawing.figure is None for drawing in draw_all(failed, []))


def test_machines_are_distinguished_by_host() -> None:
    records = synthetic.records()[:2]
    other = changed(records[1], provenance=synthetic.PROVENANCE | {"host": "another"})
    assert {entry["host"] for entry in Machines([records[0], other]).entries} == {"synthetic", "another"}
    assert Machines([changed(records[0], provenance={})]).entries[0]["commit"] == "not a checkout"


def test_small_tick_labels_leave_axis_labels_inside_the_svg() -> None:
    """An SVG draws letters at their exact width, so the layout must not round the widths to pixels."""
    figure, axes = make_axes(2)
    axes.set_yticks([0], ["micro-batch 2 batch 512: per GPU, micro-batch 2 batch 512"], fontsize=6)
    axes.set_ylabel("44 rows")
    svg = to_svg(Drawing("a", "a", "", (), figure=figure))
    (label_x,) = re.findall(r'x="([0-9.]+)"[^>]*>44 rows</text>', svg)
    assert float(label_x) > 7  # the rotated label of 9 points extends to the left of its position


def convergence_record(name: str, shift: float, engine: str = "native", **layout: Any) -> Any:
    """Return a run whose loss is `1 + shift` times the loss of one process in fp32, at every step."""
    made = replace(synthetic.experiment(name, **layout), engine=engine)
    common = {"wall_s": 1.0, "suite": "convergence", "provenance": synthetic.PROVENANCE}
    found = experiment_record(made, synthetic.results(made), **common)
    return replace(found, series=replace(found.series, loss=[2.0 * (1 + shift)] * 40))


@pytest.fixture(scope="module")
def converged() -> list[Any]:
    return [
        convergence_record("fp32", 0.0),
        convergence_record("order-unfused", 2e-6),
        convergence_record("order-4-micro-batches", 1e-6),
        convergence_record("fault-rate", 1e-3),
        convergence_record("seed-1", 0.1),
        convergence_record("batch-32", 0.5),
        convergence_record("z2-dp2", 3e-6, zero=2, dp=2),
        convergence_record("tp2", 4e-6, tp=2),
        convergence_record("pp2", 5e-6, pp=2),
        convergence_record("tp2-dp2", 6e-6, tp=2, dp=2),
        convergence_record("fp16", 0.01, precision="fp16"),
        convergence_record("deepspeed-z1-dp2", 7e-6, "deepspeed", zero=1, dp=2),
    ]


def test_convergence_curves_end_at_their_loss_distance_from_one_process(converged: list[Any]) -> None:
    drawing: Any = loss_curves.draw_convergence(converged)
    # The last line of each label comes first, so that the first line of a label determines its final value.
    left, middle, right = (
        {line.get_label(): line.get_ydata()[-1] for line in reversed(axes.lines)}
        for axes in drawing.figure.axes
    )
    kinds = [3e-6, 4e-6, 5e-6, 6e-6, 7e-6]
    expected = dict(zip(loss_curves.LAYOUT_COLOURS, kinds, strict=True))
    assert {kind: middle[kind] for kind in expected} == pytest.approx(expected)
    assert right == pytest.approx({"other seeds": 0.1, "fp16": 0.01})
    assert left["fp16, bf16"] == pytest.approx(2.02)
    axes = drawing.figure.axes[1]
    assert [note.get_text() for note in axes.texts] == ["rate + 0.01 %"]
    (band,) = axes.collections
    assert sorted({*band.get_paths()[0].vertices[:, 1]}) == pytest.approx([1e-6, 2e-6])
    assert drawing.missing == ""
    assert "convergence/batch-32" not in drawing.records
    assert "5 layouts in fp32 and 1 in 16 bits" in drawing.caption
    assert "7.0e-06 of an fp32 layout, 2.0e-06 of one process with another summation" in drawing.caption


def test_convergence_figure_omits_incomplete_and_foreign_runs(converged: list[Any]) -> None:
    """The figure needs the run of one process and its controls; a run without all losses counts as missing."""
    none = loss_curves.CONVERGENCE
    for prefix in ("fp32", "order-"):
        assert loss_curves.draw_convergence([r for r in converged if not r.name.startswith(prefix)]) is none
    assert loss_curves.draw_convergence([replace(r, suite="mine") for r in converged]) is none
    incomplete = {r.name: r for r in converged}
    fp16 = incomplete["fp16"]
    incomplete["fp16"] = replace(fp16, series=replace(fp16.series, loss=[None, *fp16.series.loss[1:]]))
    incomplete["pp2"] = replace(incomplete["pp2"], outcome="oom")
    drawing = loss_curves.draw_convergence([*incomplete.values()])
    assert not {"convergence/fp16", "convergence/pp2"} & {*drawing.records}
    assert drawing.missing == none.missing, "no run in 16 bits has all losses"
