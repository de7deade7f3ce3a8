"""Tests of figures with one function each: values of their records, and the command for missing records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import synthetic
from overlaps import text_layout_errors

from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.config import Experiment, Layout
from repro.parallel.pipeline.schedule import build_schedule
from repro.report.figures import (
    layout_fit,
    peak_memory,
    predicted_steps,
    schedules,
    zero_stages,
)
from repro.report.figures.style import Drawing, figure_style
from repro.report.figures.values import View
from repro.results.schema import ExperimentRecord
from repro.simulate.record import failed_record
from repro.simulate.time.breakdown import STAGE_SEND
from repro.simulate.time.calibration import UNCALIBRATED
from tests.records import changed

GB = 10**9


def record(suite: str, name: str, metrics: dict[str, float], **layout: Any) -> ExperimentRecord:
    """Return a simulated record with invented metrics."""
    model = replace(synthetic.MODEL, heads=16, hidden=64)
    made = failed_record(
        Experiment(name=name, model=model, layout=Layout(**layout)), "", suite=suite, wall_s=0.1
    )
    facts = {"system": "dgx2", "memory_bytes": 34 * GB, "devices_per_node": 16.0}
    return changed(made, outcome="ok", metrics=metrics, simulated_on=facts)


@pytest.fixture(scope="module")
def view() -> View:
    return View(judge(load_ledger(), []), [])


def drawn(draw: Callable[..., Drawing], *arguments: Any) -> Drawing:
    with figure_style():
        return draw(*arguments)


def texts(drawing: Drawing, axes: int = 0) -> list[str]:
    assert drawing.figure is not None
    return [text.get_text() for text in drawing.figure.axes[axes].texts]


def has_readable_texts(drawing: Drawing) -> bool:
    assert drawing.figure is not None
    with figure_style():
        return text_layout_errors(drawing.figure) == []


def test_figures_without_records_name_the_command_to_run(view: View) -> None:
    with figure_style():
        drawings = [
            layout_fit.draw_degrees(view, []),
            predicted_steps.draw_breakdown(view, []),
            peak_memory.draw_timelines([]),
            zero_stages.draw_link_traffic([]),
        ]
        drawings.append(predicted_steps.draw_machine([], []))
    for drawing in drawings:
        assert (drawing.figure, drawing.records) == (None, ())
        assert drawing.missing.startswith("repro run suites/")


def test_model_states_are_drawn_next_to_published_totals(view: View) -> None:
    drawing = drawn(zero_stages.draw_published_states, view, [])
    assert texts(drawing) == [
        "published 120, simulated: not run, analytic 120",
        "published 31.4, simulated: not run, analytic 31.41",
        "published 16.6, simulated: not run, analytic 16.64",
        "published 1.9, simulated: not run, analytic 1.875",
    ]
    assert (drawing.records, drawing.missing) == ((), zero_stages.PUBLISHED_STATES.missing)
    parts = {"memory.parameters_bytes": 15e9, "memory.gradients_bytes": 15e9, "memory.optimizer_bytes": 1.4e9}
    simulated = [record("zero_memory", "7.5b-z1-n64", parts | {"memory.states_bytes": 31.4e9})]
    with figure_style():
        drawing = zero_stages.draw_published_states(
            View(judge(load_ledger(), simulated), simulated), simulated
        )
    assert drawing.records == ("zero_memory/7.5b-z1-n64",)
    assert texts(drawing)[1] == "published 31.4, simulated 31.4, analytic 31.41"
    assert drawing.figure is not None
    filled = [bar.get_width() for bar in drawing.figure.axes[0].patches if bar.get_facecolor()[3]]
    assert filled == pytest.approx([15, 15, 1.4])
    assert has_readable_texts(drawing)


def test_tensor_parallel_degrees_show_required_memory_and_fit(view: View) -> None:
    def at(degree: int, need: float) -> ExperimentRecord:
        metrics = {
            "memory.peak_bytes": need,
            "memory.limit_bytes": 32.0 * GB,
            "memory.context_bytes": 2.0 * GB,
        }
        found = record("turing_nlg", f"zero1-mp{degree}", metrics, tp=degree, dp=16 // degree, micro_batch=8)
        return changed(found, outcome="ok" if need <= 32 * GB else "oom")

    drawing = drawn(layout_fit.draw_degrees, view, [at(4, 28.0 * GB), at(2, 41.0 * GB), at(1, 100.0 * GB)])
    assert [text for text in texts(drawing) if text != "▲"] == ["30", "43", "102 ↑"]
    assert texts(drawing).count("▲") == 2
    assert texts(drawing, 1) == ["32"]
    assert drawing.missing == layout_fit.DEGREES.missing
    assert has_readable_texts(drawing)


def test_parts_of_a_step_sum_to_the_step_time(view: View) -> None:
    times = {
        "step_seconds.median": 50.0,
        "time.compute_s": 40.0,
        "time.optimizer_s": 1.0,
        "time.exposed_s": 4.0,
    }
    plain = record("yuan", "yuan-245b", times)
    assert predicted_steps.seconds_by_part(plain) == {
        "compute": 40,
        "optimizer": 1,
        "waits for communication": 4,
        "bubble": pytest.approx(5),
    }
    kinds = {
        "busy": {"matmul": 30.0, "elementwise": 9.0, "host": 1.0, "optimizer": 1.0},
        "exposed": {"all-reduce of block (tp)": 3.0, "all-reduce of gradients (dp)": 0.6, STAGE_SEND: 0.4},
    }
    fine = changed(plain, series={"seconds": kinds})
    found = predicted_steps.seconds_by_part(fine)
    assert found["other operators"] == 10
    assert found["waits for tensor parallelism"] == 3
    assert found["waits between stages"] == 0.4
    assert sum(found.values()) == pytest.approx(50)
    drawing = drawn(predicted_steps.draw_breakdown, view, [fine])
    assert texts(drawing) == ["46.20 s", "50.00 s"]
    assert drawing.caption.endswith(f"Times rest on: {UNCALIBRATED} (1)."), (
        "the system of the record is not calibrated"
    )
    assert "repro run suites/megatron_2021.toml --evidence simulated" in drawing.missing
    assert has_readable_texts(drawing)
    turing = record("turing_nlg", "zero2-mp4", times)
    drawing = drawn(predicted_steps.draw_breakdown, view, [turing])
    assert texts(drawing) == ["50 s"], "the figure has only the panel of turing_nlg"
    assert has_readable_texts(drawing)


def test_drawn_schedules_are_those_of_the_runner(view: View) -> None:
    drawing = drawn(schedules.draw_schedules, view)
    actions = sum(len(stage) for name, _, v in schedules.SCHEDULES for stage in build_schedule(name, 4, 8, v))
    assert sum(len(texts(drawing, axes)) for axes in range(3)) == actions
    assert drawing.figure is not None
    for axes in drawing.figure.axes:
        assert axes.get_xlim() == (0, 33), "all panels have the width of GPipe: 8 x 3 busy and 3 x 3 idle"
    titles = [axes.get_title("left") for axes in drawing.figure.axes]
    assert ["37.5 %" in title for title in titles] == [True, True, False]
    assert all("twin not measured" in title for title in titles)
    assert drawing.missing == schedules.PAPER_SCHEDULES.missing


def test_timeline_stacks_live_bytes_by_category(view: View) -> None:
    memory = {
        "unit": 10**6,
        "bytes": {"parameters": [15000], "activations": [0, 500, 1000, 500], "host": [7]},
        "phases": [[0, "forward", 0], [2, "backward", 0]],
    }
    made = changed(
        record("zero_memory", "7.5b-z1-n64", {"memory.limit_bytes": 32e9}), series={"memory": memory}
    )
    assert peak_memory.gigabytes_by_category(made) == {
        "parameters": [15.0] * 4,
        "activations": [0.0, 0.5, 1.0, 0.5],
    }
    older = record("zero_memory", "7.5b-z2-n64", {"memory.limit_bytes": 32e9})
    drawing = drawn(peak_memory.draw_timelines, [made, older])
    assert drawing.records == ("zero_memory/7.5b-z1-n64",)
    assert drawing.missing.count("--rerun") == 2
    assert has_readable_texts(drawing)


def test_bytes_of_a_sample_are_summed_over_all_gpus() -> None:
    sent = {
        "comm.sent_bytes": 9e9,
        "comm.link.nvlink.sent_bytes": 8e9,
        "comm.link.inter-node.sent_bytes": 1e9,
    }
    made = record("zero_throughput", "fig2-8b-zero", sent, tp=4, dp=2, micro_batch=8, global_batch=32)
    assert zero_stages.sample_bytes_by_link(made) == {"nvlink": 2e9, "inter-node": 0.25e9}
    drawing = drawn(zero_stages.draw_link_traffic, [made])
    assert drawing.records == ("zero_throughput/fig2-8b-zero",)
    assert texts(drawing, 1) == ["no record"] * 9
    assert drawing.missing == zero_stages.LINKS.missing
    assert has_readable_texts(drawing)


def test_measurements_are_compared_with_predictions_for_this_machine_only() -> None:
    measured = changed(record("machine", "dp-on-2", {"step_seconds.median": 2.0}, dp=2), evidence="measured")
    here = record("machine", "dp-on-2@here", {"step_seconds.median": 2.2}, dp=2)
    other = changed(
        record("machine", "dp-on-2@dgx2", {"step_seconds.median": 0.1}, dp=2), written="9999-01-01"
    )
    found = predicted_steps.measured_pairs([measured], [here, other], "step_seconds.median")
    assert found == [("machine/dp-on-2", 2.0, 2.2)]
    drawing = drawn(predicted_steps.draw_machine, [measured], [here, other])
    assert "seconds of a step: 1 run, median error 10.0 %" in drawing.caption
    assert drawing.missing == predicted_steps.MACHINE_COMMAND
    assert has_readable_texts(drawing)
