"""Tests of redrawn published figures: the ledger's published values, the judge's values, and missing records."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.claims.judge import judge
from repro.claims.published import parse_printed_number
from repro.config.errors import ConfigError
from repro.report.figures import draw_all, redrawn, schedules, values, zero_stages
from repro.report.figures.style import Drawing, make_axes
from repro.report.figures.values import Ours, Value, View
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.simulate.record import failed_record
from repro.simulate.time.calibration import PUBLISHED_POINT
from tests import committed
from tests.records import changed
from tests.report.overlaps import text_layout_errors

pytestmark = pytest.mark.usefixtures("report_style")
LEDGER = committed.ledger()
FIG4 = "zero-table10-fig4-dp-only"
SUITES = Path(__file__).parents[2] / "suites"
METRICS = """
hardware_flops_per_s.device hardware_flops_per_s samples_per_s step_seconds.median
memory.states_bytes memory.peak_bytes memory.reserved_bytes memory.context_bytes memory.limit_bytes
memory.parameters_bytes memory.gradients_bytes memory.optimizer_bytes model.parameters parameters
comm.sent_bytes comm.link.nvlink.sent_bytes comm.link.inter-node.sent_bytes
time.compute_s time.optimizer_s time.exposed_s
"""
SIZES = {"hardware_flops_per_s.device": 3e13, "hardware_flops_per_s": 1e16, "samples_per_s": 50.0}
TIMELINE = {
    "unit": 10**6,
    "bytes": {"parameters": [9000], "activations": [k * 90 for k in range(96)], "host": [3]},
    "phases": [[0, "forward", 0], [40, "backward", 0], [90, "optimizer", -1]],
}


def invented(name: str, metric: str) -> float:
    """Return a reproducible number that does not depend on the published value."""
    share = int(hashlib.sha256(f"{name} {metric}".encode()).hexdigest()[:8], 16) / 2**32
    size = SIZES.get(metric, 20e9 if "bytes" in metric else 3e9 if "parameters" in metric else 10.0)
    return size * (0.7 + 0.6 * share)


@pytest.fixture(scope="module")
def records() -> list[ExperimentRecord]:
    """Return an invented simulation of every experiment that the ledger reads or a figure shows, except twins."""
    measured_here = ("smoke", "machine", "kernels", "quality", "convergence")
    found = []
    for path in sorted(SUITES.glob("*.toml")):
        if path.stem in measured_here or path.stem.startswith("windtunnel"):
            continue
        suite = committed.suite(path)
        for e in (entry.experiment for entry in suite.entries):
            if e.name.startswith("twin"):
                continue
            made = failed_record(e, "", suite=suite.name, wall_s=0.1)
            facts = {"system": e.system, "memory_bytes": 40e9, "devices_per_node": 16.0}
            metrics = {metric: invented(made.label, metric) for metric in METRICS.split()}
            series = {"memory": TIMELINE}
            found.append(changed(made, outcome="ok", simulated_on=facts, series=series, metrics=metrics))
    return found


@pytest.fixture(scope="module")
def drawings(records: list[ExperimentRecord]) -> dict[str, Drawing]:
    return {drawing.id: drawing for drawing in draw_all([], [], records, [], judge(LEDGER, records))}


def draw_one(name: str, simulated: list[ExperimentRecord]) -> Drawing:
    """Return one figure, drawn from the ledger judged on these records."""
    entry = next(entry for entry in redrawn.load_entries() if entry.id == name)
    claims = tuple(claim for claim in LEDGER.claims if claim.id in entry.claims)
    return redrawn.draw_entry(entry, View(judge(replace(LEDGER, claims=claims), simulated), simulated))


def panel_texts(drawing: Drawing, axes: int) -> list[str]:
    assert drawing.figure is not None
    return [text.get_text() for text in drawing.figure.axes[axes].texts]


def legend_texts(drawing: Drawing) -> list[str]:
    assert drawing.figure is not None
    return [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]


def heights(drawing: Drawing, *, hatched: bool, axes: int = 0) -> list[float]:
    """Return the heights of a panel's bars, from left to right."""
    assert drawing.figure is not None
    bars = [bar for bar in drawing.figure.axes[axes].patches if bool(bar.get_hatch()) is hatched]
    return [bar.get_height() for bar in sorted(bars, key=lambda bar: bar.get_x()) if bar.get_facecolor()[3]]


def published_values(claim: str, end: str) -> list[float]:
    rows = [row for row in LEDGER.claim(claim).rows if row.label.endswith(end)]
    return [row.printed.value for row in rows if row.printed]


def test_bars_are_published_values_and_the_judges_values(drawings: dict[str, Drawing]) -> None:
    """Only figures of rates name the basis of times."""
    drawing = drawings["zero-fig2"]
    ends = (": ZeRO per GPU", ": baseline per GPU", ": speed-up")
    zero, megatron, speed_up = (published_values("zero-fig2-throughput", end) for end in ends)
    assert (len(zero), 38.7 in zero, 10.23 in speed_up) == (9, True, True)
    rates = [value for pair in zip(zero, megatron, strict=True) for value in pair]
    assert heights(drawing, hatched=False) == rates
    assert heights(drawing, hatched=False, axes=2) == speed_up
    sizes = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
    names = [f"zero_throughput/fig2-{size}-{system}" for size in sizes for system in ("zero", "megatron")]
    simulated = [invented(name, "hardware_flops_per_s.device") / 1e12 for name in names]
    assert heights(drawing, hatched=True) == pytest.approx(simulated)
    assert set(drawing.records) == set(names)
    assert (drawing.missing, drawing.evidence) == ("", SIMULATED)
    times = len(names) + len(heights(drawing, hatched=True, axes=2))
    assert f"Times rest on: {PUBLISHED_POINT} ({times})." in drawing.caption
    assert "Times rest on" not in drawings["zero-fig7"].caption
    assert panel_texts(drawings["megatron-2020"], 1).count("cal.") == 2, "calibration values are marked"


def test_error_markers_are_filled_where_the_judge_accepts(records: list[ExperimentRecord]) -> None:
    sizes = {"fig3-64": 25.7, "fig3-128": 37.6, "fig3-256": 39.0, "fig3-400": 36.6}
    simulated = [changed(record) for record in records if record.name in sizes]
    for record, share in zip(simulated, (1.0, 1.5, 1.0, 1.0), strict=True):
        record.metrics["hardware_flops_per_s.device"] = share * sizes[record.name] * 1e12
    drawing = draw_one("zero-fig3", simulated)
    assert panel_texts(drawing, 1) == ["0%", "+50%", "0%", "0%"]
    assert drawing.figure is not None
    dots = [dot for dot in drawing.figure.axes[1].collections if len(dot.get_offsets()) == 1]
    assert [dot.get_offsets()[0][1] for dot in dots] == pytest.approx([0, 0.5, 0, 0])
    filled = [tuple(dot.get_facecolor()[0][:3]) != (1, 1, 1) for dot in dots]
    assert filled == [True, False, True, True]
    assert "3 of " in drawing.caption


def test_figures_without_records_name_the_command_to_run() -> None:
    """Model states and schedules are also drawn from formulas."""
    drawings = {drawing.id: drawing for drawing in draw_all([], [], [], [], judge(LEDGER, []))}
    for name in (zero_stages.PUBLISHED_STATES.id, schedules.PAPER_SCHEDULES.id):
        assert drawings.pop(name).figure is not None
    for drawing in drawings.values():
        assert (drawing.figure, drawing.records) == (None, ())
        assert drawing.missing.startswith("repro "), drawing.id
    for entry in redrawn.load_entries():
        assert "--evidence simulated" in drawings[entry.id].missing, entry.id
        assert entry.claims[0] in drawings[entry.id].caption


def test_missing_values_leave_a_gap_and_steps_that_do_not_fit_a_mark(records: list[ExperimentRecord]) -> None:
    drawing = draw_one("zero-fig4", [record for record in records if record.name == "fig4-4b-zero"])
    assert len(heights(drawing, hatched=True)) == 1
    ddp, zero = (published_values(FIG4, f" {name}: per GPU") for name in ("DDP", "ZeRO"))
    assert heights(drawing, hatched=False) == ddp + zero
    assert panel_texts(drawing, 1).count("no\nrecord") == 10
    assert drawing.missing == "repro run suites/zero_throughput.toml --evidence simulated"
    assert "The results folder has no result for 10 of 11 published values" in drawing.caption
    assert text_layout_errors(drawing.figure) == []
    simulated = [replace(r, outcome="oom") if r.name == "fig4-13b-zero" else r for r in records]
    drawing = draw_one("zero-fig4", simulated)
    assert panel_texts(drawing, 0).count("×") == 1
    assert "does not fit, simulated" in legend_texts(drawing)


def drawn_value(published: str, *ours: Ours, draw: Any, limit: float) -> Drawing:
    """Return a figure of one published value with its results, drawn in a bar's place by `draw`."""
    number = parse_printed_number(published)
    value = Value(at="8B", published=number, error=0.0, metric="", unit="", ours=ours, remedy=())
    figure, axes = make_axes(2.0)
    draw(axes, values.bar_pair(0, 0, 1), value, "#0072b2", limit)
    values.draw_legend(figure, {"a": "#0072b2"}, [value])
    return Drawing("", "", "", (), figure=figure)


def test_bar_shows_the_measurement_and_dot_the_simulation() -> None:
    common: Any = {"low": 30.0, "high": 30.0, "agrees": True, "runs": ("s/a",), "fits": True}
    found = (Ours(kind="measured", value=30.0, **common), Ours(kind=SIMULATED, value=31.0, **common))
    drawing: Any = drawn_value("31", *found, draw=values.draw_bars, limit=1.0)
    (axes,) = drawing.figure.axes
    assert [(bar.get_height(), bar.get_hatch()) for bar in axes.patches] == [(31, None), (30, ".....")]
    assert [tuple(dots.get_offsets()[0]) for dots in axes.collections] == [(pytest.approx(0.1974), 31)]
    assert legend_texts(drawing) == ["published", "measured", "simulated (also measured)"]


def test_predictions_with_uncertain_inputs_are_drawn_with_their_intervals() -> None:
    """The error of +20 % is possible; the interval from -40 % to +100 % is cut at the axis limits of 30 %."""
    interval: Any = {"value": 12.0, "low": 6.0, "high": 20.0, "agrees": None, "possible": True}
    ours = Ours(kind=SIMULATED, runs=("s/a",), fits=True, **interval)
    drawing: Any = drawn_value("10", ours, draw=values.draw_error, limit=0.3)
    assert panel_texts(drawing, 0) == ["+20%?"]
    ends = [tuple(line.get_ydata()) for line in drawing.figure.axes[0].lines]
    assert ends[:2] == [(0, pytest.approx(0.2)), pytest.approx((-0.3, 0.3))]
    assert legend_texts(drawing) == ["published", "simulated", "?: interval contains published value"]


def test_texts_neither_overlap_nor_leave_the_figure(drawings: dict[str, Drawing]) -> None:
    found = {name: text_layout_errors(one.figure) for name, one in drawings.items() if one.figure is not None}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(found) >= len(redrawn.load_entries())


def test_errors_in_a_figures_file_name_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "redrawn.toml"
    head = '[[figure]]\nid = "f"\ntitle = "t"\ntext = "x"\nclaims = []\n[[figure.panel]]\nlabel = "GB"\n'
    file.write_text(head + 'series = [{ name = "a", rows = "zero-fig1-7p5b/P_os" }]\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"redrawn\.toml: f.*rows = 'zero-fig1-7p5b/P_os': must be CLAIM/LABEL with a \*"
    ):
        redrawn.load_entries(file)
    entry = redrawn.load_entries()[0]
    series = replace(entry.panel[0].series[0], rows="zero-fig2-throughput/*: nothing")
    broken = replace(entry, panel=[replace(entry.panel[0], series=[series])])
    with pytest.raises(ConfigError, match=r"rows = 'zero-fig2-throughput/\*: nothing'"):
        redrawn.draw_entry(broken, View(judge(LEDGER, []), []))
