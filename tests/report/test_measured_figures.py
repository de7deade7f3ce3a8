"""Tests of figures of measured records: values, records and missing records, also of alternately run experiments."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from repro.config import EmulatedNetwork, Experiment, Layout, TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.report.figures import comparisons, draw_all, loss_curves, peak_memory, zero_stages
from repro.report.figures.style import CATEGORY_COLOURS, Drawing, make_axes, to_svg
from repro.report.views import Machines, record_row
from repro.results.measured import comparison_record, experiment_record
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
    controls = {"fp32": 0.0, "order-unfused": 2e-6, "order-4-micro-batches": 1e-6, "fault-rate": 1e-3}
    controls |= {"seed-1": 0.1, "batch-32": 0.5}
    return [
        *(convergence_record(name, shift) for name, shift in controls.items()),
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
    panels = drawing.figure.axes
    left, middle, right = (
        {one.get_label(): one.get_ydata()[-1] for one in axes.lines[::-1]} for axes in panels
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


def compared(suite: str, runs: list[tuple[Experiment, float]]) -> tuple[list[Any], list[Any]]:
    """Return the records of experiments with these relative step times, and their comparisons with the first."""
    common: dict[str, Any] = {"suite": suite, "provenance": synthetic.PROVENANCE}
    results = [synthetic.results(e, seconds) for e, seconds in runs]
    made = [e for e, _ in runs]
    found = zip(made, results, strict=True)
    records = [experiment_record(e, ranks, wall_s=1.0, **common) for e, ranks in found]
    pairs = zip(made[1:], results[1:], strict=True)
    return records, [comparison_record(made[0], e, (results[0], found), **common) for e, found in pairs]


def test_each_bar_is_at_its_strategy_and_engine() -> None:
    """Megatron-core has one bar, at TP, with its value above the bar."""
    step_times = {"native": 1.0, "torch": 1.5, "megatron": 0.8}
    training = synthetic.Training(steps=20, seq=32, dropout=0.0, attention_dropout=0.0)

    def records(kind: str, names: list[str], layout: Layout) -> tuple[list[Any], list[Any]]:
        keys: dict[str, Any] = {"layout": layout, "training": training}
        made = [replace(synthetic.experiment(f"speed-{name}-{kind}"), engine=name, **keys) for name in names]
        return compared("engines", [(e, step_times[e.engine]) for e in made])

    runs, pairs = records("z0", ["native", "torch"], Layout(dp=2))
    tp_runs, tp_pairs = records("tp2", [*step_times], Layout(tp=2))
    drawing: Any = comparisons.draw_engines([*runs, *tp_runs], [*pairs, *tp_pairs])
    times, states, sent = drawing.figure.axes
    order = [text.get_text() for text in times.get_xticklabels()]
    assert order == ["DP", "TP"]
    megatron = times.containers[-1]
    assert [order[round(bar.get_x() + bar.get_width() / 2)] for bar in megatron] == ["TP"]
    assert megatron[0].get_height() == pytest.approx(0.8, rel=0.05)
    assert {1.0, 1.5, 0.8} <= {round(float(note.get_text()), 1) for note in times.texts}
    assert len(times.texts) == len(states.texts) == len(sent.texts) == 5
    assert drawing.missing == comparisons.ENGINES.missing, "some strategies have no record"
    assert set(drawing.records) == {record.label for record in [*runs, *tp_runs]}


RATES = {1.2: 2.0, 4.8: 3.0, 19.2: 2.5}
"""Measured ratio of a pair of twins, by the bandwidth of the originals' link in GB/s."""


def twins(suite: str, link: str, rate: float, ratio: float) -> tuple[list[Any], list[Any]]:
    """Return a pair of twins for `rate` GB/s, whose subject is `ratio` times as fast, and their comparison."""
    sides = {"between": 4.8e9, "within": 6e9, link: rate * 1e9}
    within = 1e7 if suite == comparisons.LARGER_TWIN_SUITE else 0.0
    network = EmulatedNetwork(nodes=2, ranks_per_node=1, between=1e7 * rate, within=within)
    predicted = {TWIN_RATIO: (ratio + 0.1, ratio + 0.2)}
    pair = [
        replace(
            synthetic.experiment(f"{name}-{link}{rate}"),
            layout=Layout(dp=2, zero=zero),
            network=network,
            twin=TwinOf(original=name, part=0.2, numbers=predicted if zero else {}, **sides),
        )
        for name, zero in (("megatron", 0), ("deepspeed", 1))
    ]
    return compared(suite, [(pair[0], ratio), (pair[1], 1.0)])


def drawn(*pairs: tuple[list[Any], list[Any]]) -> Any:
    runs, turns = ([one for pair in pairs for one in pair[side]] for side in (0, 1))
    return comparisons.draw_bandwidth_sweeps(runs, turns, published=3.75)


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def test_ratios_of_twins_are_at_the_link_bandwidth_of_their_originals() -> None:
    outside = [twins("windtunnel_between", "between", rate, ratio) for rate, ratio in RATES.items()]
    larger = twins(comparisons.LARGER_TWIN_SUITE, "between", 4.8, 3.2)
    drawing = drawn(*reversed(outside), larger)
    (axes,) = drawing.figure.axes
    found = lines(axes)
    assert found["measured, twins"][:, 0] == pytest.approx(list(RATES))
    assert found["measured, twins"][:, 1] == pytest.approx(list(RATES.values()), rel=0.05)
    assert found["predicted, originals"][:, 1] == pytest.approx([2.1, 3.1, 2.6])
    assert found["predicted, twins"][:, 1] == pytest.approx([2.2, 3.2, 2.7])
    assert found["a larger twin"][0] == pytest.approx([4.8, 3.2], rel=0.05)
    assert found["published"].tolist() == [[4.8, 3.75]]
    assert "windtunnel_within" in drawing.missing
    assert len(drawing.records) == 4
    inside = [twins("windtunnel_within", "within", rate, ratio) for rate, ratio in RATES.items()]
    drawing = drawn(*outside, *inside, larger)
    assert (len(drawing.figure.axes), drawing.missing) == (2, "")
    assert "published" not in lines(drawing.figure.axes[1]), "no published value at this link"
    assert drawn(outside[0]) is comparisons.BANDWIDTHS, "a single point is no sweep"
