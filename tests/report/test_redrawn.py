"""Tests of redrawn published figures: the ledger's published values, the judge's values, and missing records."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from overlaps import text_layout_errors

from repro.claims.expression import parse
from repro.claims.judge import experiments_read, judge
from repro.claims.ledger import Ledger
from repro.claims.published import parse_printed_number
from repro.claims.reader import load_ledger
from repro.config.errors import ConfigError
from repro.report.figures import draw_all, redrawn, values
from repro.report.figures.style import Drawing, figure_style, make_axes
from repro.report.figures.values import Ours, Value, View
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.simulate.record import failed_record
from repro.simulate.time.calibration import PUBLISHED_POINT
from tests import committed
from tests.records import changed

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


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return load_ledger()


def invented(name: str, metric: str) -> float:
    """Return a reproducible number that does not depend on the published value."""
    share = int(hashlib.sha256(f"{name} {metric}".encode()).hexdigest()[:8], 16) / 2**32
    size = SIZES.get(metric, 20e9 if "bytes" in metric else 3e9 if "parameters" in metric else 10.0)
    return size * (0.7 + 0.6 * share)


@functools.cache
def records() -> tuple[ExperimentRecord, ...]:
    """Return an invented simulation of every experiment that the ledger reads or a figure shows, except twins."""
    found = []
    for path in sorted(SUITES.glob("*.toml")):
        here = ("smoke", "machine", "kernels", "quality", "convergence")
        if path.stem in here or path.stem.startswith("windtunnel"):
            continue
        suite = committed.suite(path)
        for entry in suite.entries:
            e = entry.experiment
            if e.name.startswith("twin"):
                continue
            made = failed_record(e, "", suite=suite.name, wall_s=0.1)
            facts = {"system": e.system, "memory_bytes": 40e9, "devices_per_node": 16.0}
            metrics = {metric: invented(made.label, metric) for metric in METRICS.split()}
            series = {"memory": TIMELINE}
            found.append(changed(made, outcome="ok", simulated_on=facts, series=series, metrics=metrics))
    return tuple(found)


@pytest.fixture(scope="module")
def drawings(ledger: Ledger) -> list[Drawing]:
    simulated = list(records())
    return draw_all([], [], simulated, [], judge(ledger, simulated))


@pytest.fixture(scope="module")
def blank_drawings(ledger: Ledger) -> list[Drawing]:
    return draw_all([], [], [], [], judge(ledger, []))


def by_id(drawings: list[Drawing], name: str) -> Drawing:
    return next(drawing for drawing in drawings if drawing.id == name)


def draw_one(name: str, ledger: Ledger, simulated: list[dict[str, Any]]) -> Drawing:
    """Return one figure, drawn from the ledger judged on these records."""
    entry = next(entry for entry in redrawn.load_entries() if entry.id == name)
    claims = tuple(claim for claim in ledger.claims if claim.id in entry.claims)
    with figure_style():
        return redrawn.draw_entry(entry, View(judge(replace(ledger, claims=claims), simulated), simulated))


def heights(drawing: Drawing, *, hatched: bool, axes: int = 0) -> list[float]:
    """Return the heights of a panel's bars, from left to right."""
    assert drawing.figure is not None
    bars = [bar for bar in drawing.figure.axes[axes].patches if bool(bar.get_hatch()) is hatched]
    return [bar.get_height() for bar in sorted(bars, key=lambda bar: bar.get_x()) if bar.get_facecolor()[3]]


def published_values(ledger: Ledger, claim: str, end: str) -> list[float]:
    rows = [row for row in ledger.claim(claim).rows if row.label.endswith(end)]
    return [row.printed.value for row in rows if row.printed]


def test_published_bars_are_the_ledgers_values(ledger: Ledger, drawings: list[Drawing]) -> None:
    drawing = by_id(drawings, "zero-fig2")
    zero = published_values(ledger, "zero-fig2-throughput", ": ZeRO per GPU")
    megatron = published_values(ledger, "zero-fig2-throughput", ": baseline per GPU")
    assert len(zero) == 9
    assert heights(drawing, hatched=False) == [
        value for pair in zip(zero, megatron, strict=True) for value in pair
    ]
    speed_up = published_values(ledger, "zero-fig2-throughput", ": speed-up")
    assert heights(drawing, hatched=False, axes=2) == speed_up
    assert 38.7 in zero
    assert 10.23 in speed_up


def test_simulated_bars_are_the_judges_values_with_their_records(drawings: list[Drawing]) -> None:
    drawing = by_id(drawings, "zero-fig2")
    sizes = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
    names = [f"zero_throughput/fig2-{size}-{system}" for size in sizes for system in ("zero", "megatron")]
    metric = "hardware_flops_per_s.device"
    assert heights(drawing, hatched=True) == pytest.approx([invented(name, metric) / 1e12 for name in names])
    assert set(drawing.records) == set(names)
    assert (drawing.missing, drawing.evidence) == ("", SIMULATED)


def test_only_figures_of_rates_name_the_basis_of_times(drawings: list[Drawing]) -> None:
    drawing = by_id(drawings, "zero-fig2")
    rates, speed_ups = (heights(drawing, hatched=True, axes=axes) for axes in (0, 2))
    assert f"Times rest on: {PUBLISHED_POINT} ({len(rates) + len(speed_ups)})." in drawing.caption
    assert "Times rest on" not in by_id(drawings, "zero-fig7").caption


def test_error_markers_are_filled_where_the_judge_accepts(ledger: Ledger) -> None:
    sizes = {"fig3-64": 25.7, "fig3-128": 37.6, "fig3-256": 39.0, "fig3-400": 36.6}
    simulated = [changed(record) for record in records() if record.name in sizes]
    for record, share in zip(simulated, (1.0, 1.5, 1.0, 1.0), strict=True):
        record.metrics["hardware_flops_per_s.device"] = share * sizes[record.name] * 1e12
    drawing = draw_one("zero-fig3", ledger, simulated)
    assert drawing.figure is not None
    lower = drawing.figure.axes[1]
    assert [text.get_text() for text in lower.texts] == ["0%", "+50%", "0%", "0%"]
    dots = [dot for dot in lower.collections if len(dot.get_offsets()) == 1]
    assert [dot.get_offsets()[0][1] for dot in dots] == pytest.approx([0, 0.5, 0, 0])
    filled = [tuple(dot.get_facecolor()[0][:3]) != (1, 1, 1) for dot in dots]
    assert filled == [True, False, True, True]
    assert "3 of " in drawing.caption


def test_figures_without_records_name_the_command_to_run(blank_drawings: list[Drawing]) -> None:
    for entry in redrawn.load_entries():
        drawing = by_id(blank_drawings, entry.id)
        assert (drawing.figure, drawing.records) == (None, ())
        assert "--evidence simulated" in drawing.missing, entry.id
        assert entry.claims[0] in drawing.caption


def test_missing_values_leave_a_gap_next_to_published_bars(ledger: Ledger) -> None:
    some = [record for record in records() if record.name == "fig4-4b-zero"]
    drawing = draw_one("zero-fig4", ledger, some)
    assert len(heights(drawing, hatched=True)) == 1
    assert heights(drawing, hatched=False) == published_values(
        ledger, "zero-table10-fig4-dp-only", " DDP: per GPU"
    ) + published_values(ledger, "zero-table10-fig4-dp-only", " ZeRO: per GPU")
    assert drawing.figure is not None
    assert [text.get_text() for text in drawing.figure.axes[1].texts].count("no\nrecord") == 10
    assert drawing.missing == "repro run suites/zero_throughput.toml --evidence simulated"
    assert "For 10 of 11 published values this store has no result" in drawing.caption
    with figure_style():
        assert text_layout_errors(drawing.figure) == []


def test_bar_shows_the_measurement_and_dot_the_simulation() -> None:
    common = {"low": 30.0, "high": 30.0, "agrees": True, "runs": ("s/a",), "fits": True}
    found = [Ours(kind=kind, value=30.0 + n, **common) for n, kind in enumerate(("measured", SIMULATED))]  # type: ignore[arg-type]
    number = parse_printed_number("31")
    value = Value(at="8B", published=number, error=0.0, metric="", unit="", ours=tuple(found), remedy=())
    with figure_style():
        figure, axes = make_axes(2.0)
        values.draw_bars(axes, values.bar_pair(0, 0, 1), value, "#0072b2", 1.0)
        values.draw_legend(figure, {"a": "#0072b2"}, [value])
    assert [(bar.get_height(), bar.get_hatch()) for bar in axes.patches] == [(31, None), (30, ".....")]
    assert [tuple(dots.get_offsets()[0]) for dots in axes.collections] == [(pytest.approx(0.1974), 31)]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["published", "measured", "simulated (also measured)"]


def test_predictions_with_unknown_inputs_are_drawn_with_their_intervals() -> None:
    """The error of +20 % is possible; the interval from -40 % to +100 % is cut at the axis limits of 30 %."""
    ours = Ours(
        kind=SIMULATED, value=12.0, low=6.0, high=20.0, agrees=None, runs=("s/a",), fits=True, possible=True
    )
    value = Value(
        at="8B", published=parse_printed_number("10"), error=0.0, metric="", unit="", ours=(ours,), remedy=()
    )
    with figure_style():
        figure, axes = make_axes(2.0)
        values.draw_error(axes, values.bar_pair(0, 0, 1), value, "#0072b2", 0.3)
        values.draw_legend(figure, {"a": "#0072b2"}, [value])
    assert [text.get_text() for text in axes.texts] == ["+20%?"]
    ends = [tuple(line.get_ydata()) for line in axes.lines]
    assert ends[0] == (0, pytest.approx(0.2))
    assert ends[1] == pytest.approx((-0.3, 0.3))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["published", "simulated", "?: in the interval from unknown inputs"]


def test_steps_that_do_not_fit_are_marked(ledger: Ledger) -> None:
    simulated = [replace(r, outcome="oom") if r.name == "fig4-13b-zero" else r for r in records()]
    drawing = draw_one("zero-fig4", ledger, simulated)
    assert drawing.figure is not None
    assert [text.get_text() for text in drawing.figure.axes[0].texts].count("×") == 1
    texts = [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]
    assert "does not fit, simulated" in texts


def test_calibration_values_are_marked(drawings: list[Drawing]) -> None:
    drawing = by_id(drawings, "megatron-2020")
    assert drawing.figure is not None
    texts = [text.get_text() for text in drawing.figure.axes[1].texts]
    assert texts.count("cal.") == 2


def test_texts_neither_overlap_nor_leave_the_figure(drawings: list[Drawing]) -> None:
    with figure_style():
        found = {one.id: text_layout_errors(one.figure) for one in drawings if one.figure is not None}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(found) >= len(redrawn.load_entries())


def test_every_simulated_record_of_a_row_is_listed(ledger: Ledger, drawings: list[Drawing]) -> None:
    drawing = by_id(drawings, "megatron-2021")
    rows = [row for row in ledger.claim("meg2-table1-weak-scaling").rows if row.label.endswith(": per GPU")]
    expected = {
        name
        for row in rows
        for evidence in row.evidence
        if evidence.kind == SIMULATED
        for name in experiments_read(parse(evidence.value.text), row.variables)
    }
    assert set(drawing.records) == expected


def test_errors_in_a_figures_file_name_the_rows(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "redrawn.toml"
    head = '[[figure]]\nid = "f"\ntitle = "t"\ntext = "x"\nclaims = []\n[[figure.panel]]\nlabel = "GB"\n'
    file.write_text(head + 'series = [{ name = "a", rows = "zero-fig1-7p5b/P_os" }]\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"redrawn\.toml: f.*rows = 'zero-fig1-7p5b/P_os': must be claim/label with a \*"
    ):
        redrawn.load_entries(file)
    view = View(judge(ledger, []), [])
    entry = redrawn.load_entries()[0]
    series = replace(entry.panel[0].series[0], rows="zero-fig2-throughput/*: nothing")
    broken = replace(entry, panel=[replace(entry.panel[0], series=[series])])
    with pytest.raises(ConfigError, match=r"rows = 'zero-fig2-throughput/\*: nothing'"):
        redrawn.draw_entry(broken, view)
