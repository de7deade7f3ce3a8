"""Tests of figures with synthetic records: their values, the list of their records, and missing records."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import synthetic

from repro.report.figures import draw_all, loss_curves, peak_memory, zero_stages
from repro.report.figures.style import CATEGORY_COLOURS, Drawing, figure_style, make_axes, to_svg
from repro.report.views import Machines, record_row
from repro.results.select import select
from tests.records import changed


@pytest.fixture(scope="module")
def selected() -> Any:
    return select(synthetic.records())


def drawn(draw: Any, records: list[Any]) -> Any:
    with figure_style():
        return draw(records)


@pytest.mark.parametrize(
    "draw",
    [
        zero_stages.draw_measured_states,
        zero_stages.draw_volume,
        loss_curves.draw_parity,
        loss_curves.draw_convergence,
        peak_memory.draw_peaks,
    ],
)
def test_figures_without_records_name_the_command_to_run(draw: Any) -> None:
    drawing = drawn(draw, [])
    assert drawing.figure is None
    assert drawing.records == ()
    assert drawing.missing.startswith("repro run suites/")


def test_bars_are_measured_model_states_and_markers_the_formula(selected: Any) -> None:
    drawing = drawn(zero_stages.draw_measured_states, selected.measured)
    axes = drawing.figure.axes[0]
    metrics = {r.name: r.metrics for r in selected.measured}
    tops: dict[float, float] = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    measured = [
        metrics[f"states-z{z}-dp{n}"]["memory.states_bytes"] / synthetic.PSI
        for n in (1, 2, 4)
        for z in range(4)
    ]
    assert [tops[x] for x in sorted(tops)] == pytest.approx(measured)
    formula = [line.get_ydata()[0] for line in axes.lines]
    assert formula == [16, 16, 16, 16, 16, 10, 9, 8, 16, 7, 5.5, 4]
    assert len(drawing.records) == 12
    assert drawing.missing == ""


def test_incomplete_figures_name_the_command_for_missing_records(selected: Any) -> None:
    some = [r for r in selected.measured if r.name in ("states-z0-dp2", "states-z1-dp2")]
    drawing = drawn(zero_stages.draw_measured_states, some)
    assert drawing.figure is not None
    assert set(drawing.records) == {"smoke/states-z0-dp2", "smoke/states-z1-dp2"}
    assert drawing.missing == zero_stages.MEASURED_STATES.missing


def test_communication_is_relative_to_plain_data_parallelism(selected: Any) -> None:
    axes = drawn(zero_stages.draw_volume, selected.measured).figure.axes[0]
    heights = sorted(bar.get_height() for bars in axes.containers for bar in bars)
    assert heights == pytest.approx([1, 1, 1, 1, 1, 1, 1.5, 1.5, 1.5, 1.5])
    without_base = [r for r in selected.measured if r.name != "states-z0-dp2"]
    (bars,) = drawn(zero_stages.draw_volume, without_base).figure.axes[0].containers
    assert len(bars) == 5


def test_loss_figure_needs_the_single_process_run(selected: Any) -> None:
    drawing = drawn(loss_curves.draw_parity, selected.measured)
    assert len(drawing.records) == 11
    assert "10 strategies" in drawing.caption
    without = [r for r in selected.measured if r.name != loss_curves.SINGLE_PROCESS]
    assert drawn(loss_curves.draw_parity, without).figure is None


def test_a_nan_loss_is_reported_in_the_caption(selected: Any) -> None:
    with_nan = []
    for record in selected.measured:
        if record.name == "parity-z1-dp2":
            losses = [*record.series.loss[:-1], None]
            record = replace(record, series=replace(record.series, loss=losses))
        with_nan.append(record)
    drawing = drawn(loss_curves.draw_parity, with_nan)
    assert drawing.figure is not None
    drawing.figure.canvas.draw()
    assert "1 loss values were NaN" in drawing.caption


def test_peak_memory_is_that_of_the_fullest_rank(selected: Any) -> None:
    record = selected.measured[0]
    small = record.memory_by_rank[0]
    large = replace(small, peak={**small.peak, "total": small.peak["total"] + 1})
    assert peak_memory.peak_of_fullest_rank(replace(record, memory_by_rank=[small, large])) == large.peak
    assert set(CATEGORY_COLOURS) | {"total"} == set(small.peak)


def test_records_without_memory_categories_are_omitted_and_reported(selected: Any) -> None:
    first = selected.measured[0]
    known = {name: value for name, value in first.metrics.items() if name != "memory.activations_bytes"}
    foreign = replace(first, name="speed-torch-z0-dp2", metrics=known)
    drawing = drawn(peak_memory.draw_peaks, [*selected.measured, foreign])
    assert "smoke/speed-torch-z0-dp2" not in drawing.records
    assert "Omitted: 1 experiments" in drawing.caption
    assert record_row(foreign)["peak_gb"] == record_row(first)["peak_gb"] is not None


def test_gpu_memory_outside_torch_allocator_is_reported(selected: Any) -> None:
    first = selected.measured[0]
    on_gpu = replace(first, metrics={**first.metrics, "memory.context_bytes": 1.5e9})
    outside = [record_row(one)["facts"]["GPU memory outside torch's allocator"] for one in (first, on_gpu)]
    assert outside == ["", "1.5 GB"]


def test_failed_records_are_not_drawn(selected: Any) -> None:
    failed = [r for r in selected.measured if r.outcome != "ok"]
    assert failed
    assert all(drawing.figure is None for drawing in draw_all(failed, []))


def test_newest_conclusive_record_is_selected() -> None:
    first, *_ = synthetic.records()
    newer = changed(first, written="9998-01-01", id="newer")
    failed = changed(first, written="9999-01-01", outcome="hang", id="failed")
    foreign = changed(first, protocol=-1)
    selected = select([failed, newer, first, foreign])
    assert [r.id for r in selected.measured] == ["newer"]
    assert (selected.older, selected.foreign) == (2, 1)


def test_machines_are_distinguished_by_host() -> None:
    records = synthetic.records()[:2]
    other = changed(records[1], provenance=synthetic.PROVENANCE | {"host": "another"})
    assert {entry["host"] for entry in Machines([records[0], other]).entries} == {"synthetic", "another"}
    assert Machines([changed(records[0], provenance={})]).entries[0]["commit"] == "not a checkout"


def test_small_tick_labels_leave_axis_labels_inside_the_svg() -> None:
    """An SVG draws letters at their exact width, so the layout must not round the widths to pixels."""
    with figure_style():
        figure, axes = make_axes(2)
        axes.set_yticks([0], ["micro-batch 2 batch 512: per GPU, micro-batch 2 batch 512"], fontsize=6)
        axes.set_ylabel("44 rows")
    (label_x,) = re.findall(
        r'x="([0-9.]+)"[^>]*>44 rows</text>', to_svg(Drawing("a", "a", "", (), figure=figure))
    )
    assert float(label_x) > 7  # the rotated label of 9 points extends to the left of its position
