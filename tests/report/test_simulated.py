"""Tests of simulated records: their figures, and their rows on the page, separate from measured records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.claims.judge import judge
from repro.config import Experiment, Layout, systems
from repro.launch.simulated import simulate_experiment
from repro.parallel.pipeline.schedule import build_schedule
from repro.report.figures import draw_all, layout_fit, peak_memory, predicted_steps, schedules, zero_stages
from repro.report.figures.style import Drawing
from repro.report.figures.values import View
from repro.report.page.build import build_report
from repro.report.views import record_row
from repro.results.schema import ExperimentRecord
from repro.results.select import select
from repro.results.store import Store
from repro.results.tables import experiment_row
from repro.simulate.record import failed_record
from repro.simulate.time.breakdown import STAGE_SEND
from repro.simulate.time.calibration import BASES, PUBLISHED_POINT, UNCALIBRATED
from tests import committed
from tests.records import changed
from tests.report import synthetic
from tests.report.overlaps import text_layout_errors
from tests.report.test_page import stored_rows

pytestmark = pytest.mark.usefixtures("report_style")
GB = 10**9


def record(suite: str, name: str, metrics: dict[str, float], **layout: Any) -> ExperimentRecord:
    """Return a simulated record with invented metrics."""
    model = replace(synthetic.MODEL, heads=16, hidden=64)
    experiment = Experiment(name=name, model=model, layout=Layout(**layout))
    made = failed_record(experiment, "", suite=suite, wall_s=0.1)
    facts = {"system": "dgx2", "memory_bytes": 34 * GB, "devices_per_node": 16.0}
    return changed(made, outcome="ok", metrics=metrics, simulated_on=facts)


@pytest.fixture(scope="module")
def view() -> View:
    return View(judge(committed.ledger(), []), [])


def readable_texts(drawing: Drawing) -> list[list[str]]:
    """Return the texts in each panel of a figure, whose texts neither overlap nor leave the picture."""
    assert drawing.figure is not None
    assert text_layout_errors(drawing.figure) == []
    return [[text.get_text() for text in axes.texts] for axes in drawing.figure.axes]


def test_model_states_are_drawn_next_to_published_totals(view: View) -> None:
    drawing = zero_stages.draw_published_states(view, [])
    assert readable_texts(drawing)[0] == [
        "published 120, simulated: not run, analytic 120",
        "published 31.4, simulated: not run, analytic 31.41",
        "published 16.6, simulated: not run, analytic 16.64",
        "published 1.9, simulated: not run, analytic 1.875",
    ]
    assert (drawing.records, drawing.missing) == ((), zero_stages.PUBLISHED_STATES.missing)
    parts = {"memory.parameters_bytes": 15e9, "memory.gradients_bytes": 15e9, "memory.optimizer_bytes": 1.4e9}
    simulated = [record("zero_memory", "7.5b-z1-n64", parts | {"memory.states_bytes": 31.4e9})]
    judged = View(judge(committed.ledger(), simulated), simulated)
    drawing = zero_stages.draw_published_states(judged, simulated)
    assert drawing.records == ("zero_memory/7.5b-z1-n64",)
    assert readable_texts(drawing)[0][1] == "published 31.4, simulated 31.4, analytic 31.41"
    assert drawing.figure is not None
    filled = [bar.get_width() for bar in drawing.figure.axes[0].patches if bar.get_facecolor()[3]]
    assert filled == pytest.approx([15, 15, 1.4])


def test_tensor_parallel_degrees_show_required_memory_and_fit(view: View) -> None:
    def at(degree: int, need: float) -> ExperimentRecord:
        limits = {"memory.limit_bytes": 32.0 * GB, "memory.context_bytes": 2.0 * GB}
        metrics = {"memory.peak_bytes": need, **limits}
        found = record("turing_nlg", f"zero1-mp{degree}", metrics, tp=degree, dp=16 // degree, micro_batch=8)
        return changed(found, outcome="ok" if need <= 32 * GB else "oom")

    drawing = layout_fit.draw_degrees(view, [at(4, 28.0 * GB), at(2, 41.0 * GB), at(1, 100.0 * GB)])
    needed, published = readable_texts(drawing)
    assert [text for text in needed if text != "▲"] == ["30", "43", "102 ↑"]
    assert (needed.count("▲"), published) == (2, ["32"])
    assert drawing.missing == layout_fit.DEGREES.missing


def test_parts_of_a_step_sum_to_the_step_time(view: View) -> None:
    times = {"step_seconds.median": 50.0, "time.compute_s": 40.0}
    times |= {"time.optimizer_s": 1.0, "time.exposed_s": 4.0}
    plain = record("yuan", "yuan-245b", times)
    expected = {"compute": 40, "optimizer": 1, "waits for communication": 4, "bubble": pytest.approx(5)}
    assert predicted_steps.seconds_by_part(plain) == expected
    kinds = {
        "busy": {"matmul": 30.0, "elementwise": 9.0, "host": 1.0, "optimizer": 1.0},
        "exposed": {"all-reduce of block (tp)": 3.0, "all-reduce of gradients (dp)": 0.6, STAGE_SEND: 0.4},
    }
    fine = changed(plain, series={"seconds": kinds})
    found = predicted_steps.seconds_by_part(fine)
    parts = ("other operators", "waits for tensor parallelism", "waits between stages")
    assert [found[part] for part in parts] == [10, 3, 0.4]
    assert sum(found.values()) == pytest.approx(50)
    drawing = predicted_steps.draw_breakdown(view, [fine])
    assert readable_texts(drawing)[0] == ["46.20 s", "50.00 s"]
    assert drawing.caption.endswith(f"Times rest on: {UNCALIBRATED} (1).")
    assert "repro run suites/megatron_2021.toml --evidence simulated" in drawing.missing
    drawing = predicted_steps.draw_breakdown(view, [record("turing_nlg", "zero2-mp4", times)])
    assert readable_texts(drawing)[0] == ["50 s"], "the figure has only the panel of turing_nlg"


def test_drawn_schedules_are_those_of_the_runner(view: View) -> None:
    drawing = schedules.draw_schedules(view)
    assert drawing.figure is not None
    actions = sum(len(stage) for name, _, v in schedules.SCHEDULES for stage in build_schedule(name, 4, 8, v))
    assert sum(len(axes.texts) for axes in drawing.figure.axes) == actions
    for axes in drawing.figure.axes:
        assert axes.get_xlim() == (0, 33), "all panels have the width of GPipe: 8 x 3 busy and 3 x 3 idle"
    titles = [axes.get_title("left") for axes in drawing.figure.axes]
    assert ["37.5 %" in title for title in titles] == [True, True, False]
    assert all("twin not measured" in title for title in titles)
    assert drawing.missing == schedules.PAPER_SCHEDULES.missing


def test_timeline_stacks_live_bytes_by_category() -> None:
    memory = {
        "unit": 10**6,
        "bytes": {"parameters": [15000], "activations": [0, 500, 1000, 500], "host": [7]},
        "phases": [[0, "forward", 0], [2, "backward", 0]],
    }
    limit = {"memory.limit_bytes": 32e9}
    made = changed(record("zero_memory", "7.5b-z1-n64", limit), series={"memory": memory})
    expected = {"parameters": [15.0] * 4, "activations": [0.0, 0.5, 1.0, 0.5]}
    assert peak_memory.gigabytes_by_category(made) == expected
    drawing = peak_memory.draw_timelines([made, record("zero_memory", "7.5b-z2-n64", limit)])
    assert drawing.records == ("zero_memory/7.5b-z1-n64",)
    assert drawing.missing.count("--rerun") == 2
    assert readable_texts(drawing)


def test_bytes_of_a_sample_are_summed_over_all_gpus() -> None:
    sent = {"comm.sent_bytes": 9e9}
    sent |= {"comm.link.nvlink.sent_bytes": 8e9, "comm.link.inter-node.sent_bytes": 1e9}
    made = record("zero_throughput", "fig2-8b-zero", sent, tp=4, dp=2, micro_batch=8, global_batch=32)
    assert zero_stages.sample_bytes_by_link(made) == {"nvlink": 2e9, "inter-node": 0.25e9}
    drawing = zero_stages.draw_link_traffic([made])
    assert drawing.records == ("zero_throughput/fig2-8b-zero",)
    assert readable_texts(drawing)[1] == ["no record"] * 9
    assert drawing.missing == zero_stages.LINKS.missing


def test_measurements_are_compared_with_predictions_for_this_machine_only() -> None:
    measured = changed(record("machine", "dp-on-2", {"step_seconds.median": 2.0}, dp=2), evidence="measured")
    here = record("machine", "dp-on-2@here", {"step_seconds.median": 2.2}, dp=2)
    other = record("machine", "dp-on-2@dgx2", {"step_seconds.median": 0.1}, dp=2)
    other = changed(other, written="9999-01-01")
    found = predicted_steps.measured_pairs([measured], [here, other], "step_seconds.median")
    assert found == [("machine/dp-on-2", 2.0, 2.2)]
    drawing = predicted_steps.draw_machine([measured], [here, other])
    assert "seconds of a step: 1 run, median error 10.0 %" in drawing.caption
    assert drawing.missing == predicted_steps.MACHINE_COMMAND
    assert readable_texts(drawing)


CONTEXT = 1e9
SMALL, LARGE = 4e9, 8e9
"""Memory of a GPU, in bytes."""


def map_record(tp: int, pp: int, need: float, memory: float = SMALL, suite: str = "yuan") -> ExperimentRecord:
    """Return the simulation of a layout that needs these bytes, without the context, on GPUs with this memory."""
    fits = need + CONTEXT <= memory
    metrics = {"memory.peak_bytes": need - 1e8, "memory.limit_bytes": memory - CONTEXT}
    metrics |= {"memory.context_bytes": CONTEXT} | ({"memory.reserved_bytes": need} if fits else {})
    sizes = {"tp": tp, "pp": pp, "dp": 16 // (tp * pp), "global_batch": 16}
    made = record(suite, f"map-{memory:.0f}-t{tp}-p{pp}", metrics, **sizes)
    conditions = {**made.conditions, "system": f"of-{memory:.0f}"}
    facts = {"system": f"of-{memory:.0f}", "memory_bytes": memory}
    return changed(made, outcome="ok" if fits else "oom", experiment=conditions, simulated_on=facts)


def test_map_without_simulated_records_names_the_command() -> None:
    other = [map_record(1, 1, 1e9, suite="smoke"), *select(synthetic.records()).measured]
    for records in (other, [changed(map_record(1, 1, 1e9), outcome="error")]):
        drawing = layout_fit.draw_maps(records)
        assert (drawing.figure, drawing.records, drawing.missing) == (None, (), layout_fit.MAP.missing)


def test_each_record_of_a_map_is_at_its_degrees_in_its_panel() -> None:
    """The map is complete if both panels have the same layouts."""
    needs = ((1, 1, 9e9), (2, 1, 5e9), (1, 2, 2e9))
    records = [map_record(*need, memory) for need in needs for memory in (LARGE, SMALL)]
    assert layout_fit.draw_maps(records[1::2]).missing == layout_fit.MAP.missing
    assert layout_fit.draw_maps(records[:-1]).missing == layout_fit.MAP.missing
    drawing = layout_fit.draw_maps(records)
    assert (len(drawing.records), drawing.missing, drawing.evidence) == (6, "", "simulated")
    assert drawing.figure is not None
    titles = [axes.get_title("left") for axes in drawing.figure.axes]
    assert titles == ["4 GB (of-4000000000)", "8 GB (of-8000000000)"]
    missing = ["no such\nlayout"]
    small = ["5.9 GB\nd = 8, does not fit", "9.9 GB\nd = 16, does not fit", "3 GB\nd = 8, fits"]
    large = ["6 GB\nd = 8, fits", "9.9 GB\nd = 16, does not fit", "3 GB\nd = 8, fits"]
    assert readable_texts(drawing) == [small + missing, large + missing]
    axes = drawing.figure.axes[0]
    across, down = (
        [label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
    )
    positions = {text.get_text(): tuple(map(int, text.get_position())) for text in axes.texts}
    assert {text: (across[x], down[y]) for text, (x, y) in positions.items()} == {
        small[0]: ("p = 1", "t = 2"),
        small[1]: ("p = 1", "t = 1"),
        small[2]: ("p = 2", "t = 1"),
        missing[0]: ("p = 2", "t = 2"),
    }


def test_layouts_that_do_not_fit_are_never_blue() -> None:
    """Live bytes may be below the limit, because the allocator reserves more than the live bytes."""
    drawing = layout_fit.draw_maps([map_record(1, 1, 3.05e9), map_record(2, 1, 2.95e9)])
    assert readable_texts(drawing)[0] == ["3.95 GB\nd = 8, fits", "3.95 GB\nd = 16, does not fit"]
    assert drawing.figure is not None
    fits, not_fits = drawing.figure.axes[0].collections[0].get_facecolors()
    assert fits[2] > fits[0]
    assert not_fits[2] < not_fits[0]


MEASURED_EXPERIMENT = synthetic.experiment("states-z1-dp2", dp=2, zero=1, precision="bf16")


@pytest.fixture(scope="module")
def simulated() -> list[ExperimentRecord]:
    """Return simulations: of an experiment that the synthetic store has measured, of one that does not fit, failed."""
    layout = {"tp": 2, "pp": 2, "global_batch": 2, "scatter_gather": True, "recompute": True, "pa": True}
    deep = synthetic.experiment("deep", **layout)
    small = Experiment(name="tight", model=deep.model, layout=deep.layout, system="selene")
    fits, tight = (
        simulate_experiment(e, systems.load_system_file("selene"), "smoke")
        for e in (replace(MEASURED_EXPERIMENT, system="selene"), small)
    )
    tight.metrics.pop("memory.reserved_bytes")
    reason = "middle <stage>: out of memory, 8599967744 bytes requested of 32317748480"
    failed = failed_record(deep, "ValueError: no", suite="smoke", wall_s=0.1)
    return [fits, replace(tight, outcome="oom", reason=reason), failed]


def test_simulated_records_are_separate_from_measured_records(simulated: list[ExperimentRecord]) -> None:
    measured = synthetic.records()
    both, alone = select([*measured, *simulated]), select(measured)
    assert both.measured == alone.measured
    assert [record.name for record in both.simulated] == ["deep", "states-z1-dp2", "tight"]
    assert both.older == alone.older == 0
    assert all(drawing.figure is None for drawing in draw_all(select(simulated).measured, []))
    evidence = [experiment_row(record)["evidence"] for record in [*measured[:2], *simulated]]
    assert evidence == ["measured"] * 2 + ["simulated"] * 3


def test_rows_have_bytes_step_times_and_their_basis(simulated: list[ExperimentRecord]) -> None:
    row, tight, failed = map(record_row, simulated)
    assert (row["anchor"], row["outcome"]) == ("sim-smoke.states-z1-dp2", "ok")
    facts = row["facts"]
    assert facts["System"] == "2 x selene"
    assert row["states_gb"] == pytest.approx(simulated[0].metrics["memory.states_bytes"] / 1e9, rel=1e-3)
    assert facts["Reserved memory"] != "–"
    assert facts["Memory limit"] == "83.7 GB"
    assert facts["Sent between nodes"] == "0 B", "two GPUs of one node"
    assert row["step_s"] == pytest.approx(simulated[0].metrics["step_seconds.median"], rel=1e-3)
    assert facts["Basis of the step time"] == PUBLISHED_POINT, "fused kernels are calibrated on an A100"
    assert (tight["step_s"], tight["facts"]["Basis of the step time"]) == (None, "")
    assert tight["layout"] == "tp 2 x pp 2, fp32, 1f1b, recomputation, P_a, scatter/gather, micro-batch 1"
    assert tight["facts"]["Reserved memory"] == "–"
    assert tight["facts"]["Peak memory in"].endswith("stage")
    assert failed["peak_gb"] is None


def test_page_lists_simulated_records_and_links_to_them(
    simulated: list[ExperimentRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map of Yuan's layouts is the only figure and links to its record."""
    monkeypatch.setattr(
        "repro.report.figures.draw_all", lambda _, __, simulated, *of: [layout_fit.draw_maps(simulated)]
    )
    of_map = replace(map_record(2, 2, 2e9), provenance=synthetic.PROVENANCE)
    with Store(tmp_path / "results") as store:
        for record in [*synthetic.records()[:6], *simulated, of_map]:
            store.append(record)
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert (report.experiments, report.simulated) == (6, 4)
    assert {"map.svg", "map.png"} <= {path.name for path in report.figures}
    data, index, experiments, yuan = (
        (tmp_path / "out" / name).read_text(encoding="utf-8")
        for name in ("records.js", "index.html", "experiments.html", "source-yuan.html")
    )
    rows = {row["anchor"]: row for row in stored_rows(data)}
    assert len(rows) == 10
    assert {"sim-smoke.states-z1-dp2", "run-smoke.states-z1-dp2"} <= set(rows)
    reasons = {row["facts"]["Reason"] for row in rows.values()}
    assert "middle <stage>: out of memory, 8.60 GB requested of 32.3 GB" in reasons
    assert "without a conclusive result: smoke/deep (error)" in index
    for basis, meaning in BASES.items():
        assert f"<dt>{basis}</dt><dd>{meaning.partition('`')[0]}" in experiments
    assert yuan.count('href="experiments.html#sim-yuan.map-4000000000-t2-p2"') == 1
    assert data.count('"sim-yuan.map-4000000000-t2-p2"') == 1
