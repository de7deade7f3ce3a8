"""Tests of `repro schedule`: the terminal drawing, the JSON document and the picture."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from rich.console import Console

from repro import cli
from repro.config import Experiment, Layout, Model
from repro.config.systems import load_system_file
from repro.report.figures.schedules import (
    STEP_COLOURS,
    action_colours,
    busy_shares,
    draw_actions,
    draw_picture,
    draw_step,
)
from repro.report.figures.style import figure_style
from repro.report.text.schedule import draw_schedule as draw_text
from repro.report.text.schedule_plan import make_schedule
from repro.simulate.step import simulate
from repro.simulate.time.breakdown import STAGE_SEND
from tests.report.overlaps import text_layout_errors

SVG = "{http://www.w3.org/2000/svg}"
YUAN = ("--pp", "38", "--micro-batches", "480")
INTERLEAVED = ("--pp", "4", "--micro-batches", "8", "--chunks", "2")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def test_drawing_has_every_action_and_summary_every_cost(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--pp", "2", "--micro-batches", "3")
    properties, _, drawing = out.partition("\n\n")
    assert properties.startswith("schedule ")
    lines = drawing.splitlines()
    assert lines[1].split()[:2] == ["0", "F0"]
    assert "F0 F1 ······B0─── F2 B1─── ···B2───" in lines[1]
    assert "···F0 B0─── F1 B1─── F2 B2─── ······" in lines[2]
    assert [line.split()[-1] for line in lines[1:3]] == ["2", "1"]
    output = " ".join(out.split())
    for expected in (
        "1F1B with flush: 2 stages, 3 micro-batches (p = 2, m = 3, v = 1)",
        "1/3 = 33.3 % of the ideal time; (p - 1) / m",
        "1/4 = 25.0 % of the total time",
        "12 = 3 x (1 forward + 2 backward) + 3 idle",
        "2 micro-batches on stage 0, falling to 1 on stage 1",
        "at most 2 micro-batches in 1/2 of the layers, as much as 1 micro-batch in all layers; GPipe: 1.5",
        "6 tensors per step between stages: 3 x 1 activations and as many gradients",
    ):
        assert expected in output
    assert "37/480 = 7.7 % of the ideal time" in printed(capsys, *YUAN)
    alone = printed(capsys, "--pp", "1", "--micro-batches", "2")
    assert "bubble       none" in alone
    assert "messages     none" in alone


def test_middle_stages_of_long_pipelines_need_the_details_option(capsys: pytest.CaptureFixture[str]) -> None:
    for stages, hidden in ((10, 0), (11, 2), (64, 55)):
        arguments = "--pp", str(stages), "--micro-batches", "64"
        lines = printed(capsys, *arguments).splitlines()
        assert len(lines) <= 24
        assert lines.count(f"  ... {hidden} stages: --details") == bool(hidden)
        all_stages = printed(capsys, *arguments, "--details").splitlines()
        drawn = [sum(line[:6].strip().isdigit() for line in shown) for shown in (lines, all_stages)]
        assert drawn == [stages - hidden, stages]


@pytest.mark.parametrize(
    ("width", "sizes"), [(60, (38, 480)), (130, (38, 480)), (60, (4, 8, 2)), (80, (4, 8, 2))]
)
def test_coloured_drawing_fits_the_terminal_width(width: int, sizes: tuple[int, ...]) -> None:
    console = Console(width=width, color_system="truecolor", force_terminal=True)
    drawing = draw_text(make_schedule("", *sizes), console)
    assert 0 < max(len(line.plain) for line in drawing if re.match(r" +\d+ \S", line.plain)) <= width


def test_wrapped_drawing_has_every_action() -> None:
    """The drawing is wider than the terminal, and its lines break between the labels of actions."""
    plan = make_schedule("interleaved", 2, 4, 2)
    lines = [line.plain for line in draw_text(plan, Console(width=61, color_system=None))]
    rows = "".join(line[6:-10] for line in lines if line.startswith("    0 "))
    assert len([line for line in lines if line.startswith("stage")]) > 1
    assert re.findall(r"[FB]\d(?:\.\d)?", rows) == [str(action) for action in plan.schedule[0]]


def test_busy_shares_sum_to_the_time_of_all_passes() -> None:
    plan = make_schedule("1f1b", 3, 7, forward="1.3", backward="17/7")
    for columns in (1, 10, 333):
        part = float(plan.total) / columns
        for stage in range(3):
            forward, backward = zip(*busy_shares(plan.slots[stage], float(plan.total), columns), strict=True)
            assert sum(forward) * part == pytest.approx(7 * 1.3)
            assert sum(backward) * part == pytest.approx(17)


def test_json_is_one_document_with_exact_times(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, *INTERLEAVED, "--json"))
    expected = {
        "schedule": "interleaved",
        "bubble": {"fraction": "3/16", "value": 0.1875, "formula": "(p - 1) / (v m)"},
        "time": {"total": 28.5, "ideal": 24.0},
        "in_flight": [11, 9, 7, 5],
        "messages": {"forward": 56, "backward": 56},
    }
    assert document | expected == document
    assert document["activations"][0] == 11 / 8
    actions = document["actions"]
    assert [len(row) for row in actions] == [32] * 4
    assert actions[0][0] == {"kind": "F", "micro_batch": 0, "chunk": 0, "start": 0.0, "stop": 0.5}
    assert make_schedule("1f1b", 3, 4, forward="1/3", backward="0.7").total == 6 * (
        Fraction(1, 3) + Fraction(7, 10)
    )
    document = json.loads(printed(capsys, *YUAN, "--forward", "1.25", "--backward", "3/2", "--json"))
    assert document["bubble"]["fraction"] == "37/480"


def svg_texts(document: str) -> list[str]:
    root = ElementTree.fromstring(document)
    assert root.tag == f"{SVG}svg"
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_picture_has_a_number_for_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    texts = svg_texts(printed(capsys, *INTERLEAVED, "--svg"))
    assert texts.count("7") == 4 * 2 * 2 + 1, (
        "forward and backward passes of micro-batch 7, and 7 passes in flight on stage 2"
    )
    output = " ".join(texts)
    for expected in (
        "Bubble 3/16 = 18.8 %",
        "ideal time 24",
        "idle time 4.5",
        "in flight",
        "forward",
        "idle",
    ):
        assert expected in output


def drawn_cells(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Return the start and the end of each cell, by colour."""
    return {
        to_hex(patch.get_facecolor()): [
            (left, right)
            for left, right in patch.get_path().vertices.reshape(-1, 5, 2)[:, :2, 0].tolist()
            if right >= left
        ]
        for patch in axes.patches
    }


@pytest.mark.parametrize("layout", [{"dp": 4, "zero": 1}, {"pp": 2, "dp": 2}, {"tp": 2}, {}])
def test_picture_has_the_compute_and_communication_times(layout: dict[str, int]) -> None:
    """Passes minus waits are compute time; messages are all communication of the step, exposed or overlapped."""
    model = Model(name="m", layers=4, hidden=256, heads=4, vocab=512, seq=128)
    experiment = Experiment(name="e", model=model, layout=Layout(precision="fp16", **layout))
    prediction = simulate(experiment, load_system_file("dgx2"), time=True, record=True).time
    assert prediction is not None
    step, axes = prediction.timeline, Figure().subplots()
    draw_step(axes, step, (600, 20))
    cells = drawn_cells(axes)
    within = {
        fill: [(max(0, left), min(1e3 * step.step_s, right)) for left, right in found]
        for fill, found in cells.items()
    }
    ms = {name: sum(max(0, b - a) for a, b in within.get(fill, ())) for name, fill in STEP_COLOURS.items()}
    busy = sum(seconds for stage in step.stages for seconds in stage.busy.values())
    computed = ms["forward"] + ms["backward"] + ms["update"] - ms["waiting"]
    assert computed == pytest.approx(1e3 * busy, rel=1e-6)
    sent = sum(
        seconds / (1 + (label == STAGE_SEND))  # both stages count a message, which is drawn at its receiver
        for stage in step.stages
        for label, seconds in stage.communication.items()
    )
    messages = sum(time for name, time in ms.items() if name.endswith("messages"))
    assert messages == pytest.approx(1e3 * sent, rel=1e-6)
    groups = {name.split()[0] for name, time in ms.items() if name.endswith("messages") and time}
    assert groups == {*layout} - {"zero"} | ({"dp"} if layout else set()), "dp: all ranks reduce the norm"
    stages = [f"stage {n}" for n in range(layout.get("pp", 1))]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == stages


@pytest.mark.parametrize(("name", "chunks", "window"), [("1f1b", 1, (0, 33)), ("interleaved", 2, (5, 11))])
def test_cells_have_the_times_of_the_actions(name: str, chunks: int, window: tuple[float, float]) -> None:
    rows = make_schedule(name, 4, 8, chunks).slots
    axes = Figure().subplots()
    draw_actions(axes, rows, window, (600, 20))
    area = {fill: sum(right - left for left, right in cells) for fill, cells in drawn_cells(axes).items()}
    expected: dict[str, float] = {}
    for row in rows:
        for action, start, stop in row:
            fill = action_colours(action.kind, action.chunk, chunks)[1]
            expected[fill] = expected.get(fill, 0) + max(0, min(stop, window[1]) - max(start, window[0]))
    assert area == pytest.approx({fill: float(time) for fill, time in expected.items()})


def test_large_picture_is_complete_and_below_2_mb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "yuan.svg"
    assert printed(capsys, *YUAN, "--out", str(path)).strip() == str(path)
    assert path.stat().st_size < 2_000_000
    output = " ".join(svg_texts(path.read_text(encoding="utf-8")))
    for expected in ("The full step", "passes in the first 123", "passes in the last 123"):
        assert expected in output


@pytest.mark.parametrize(
    "sizes", [("gpipe", 1, 1, 1), ("1f1b", 2, 480, 1), ("interleaved", 64, 64, 2), ("interleaved", 2, 2, 20)]
)
def test_pictures_of_unusual_sizes_are_readable(sizes: tuple[str, int, int, int]) -> None:
    plan = make_schedule(*sizes)
    with figure_style():
        figure = draw_picture(plan.slots, plan.title, "facts")
        for axes in figure.axes:
            for text in axes.texts:  # labels of cells are sized to fit
                text.set_visible(False)
        assert text_layout_errors(figure) == []


def test_labels_contrast_with_every_cell_colour() -> None:
    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    cells = [(kind, chunk, chunks) for chunks in range(1, 9) for kind in "FB" for chunk in range(chunks)]
    for cell in cells:
        dark, light = sorted(map(luminance, action_colours(*cell)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, cell  # WCAG 2 AA
