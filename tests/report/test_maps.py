"""Tests of the map of Yuan's layouts: simulated records at their degrees, and the command for missing records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from repro.config import Experiment, Layout
from repro.report.figures import draw_all, layout_fit
from repro.report.figures.style import Drawing, figure_style
from repro.report.page.build import build_report
from repro.results.schema import ExperimentRecord
from repro.results.select import select
from repro.results.store import Store
from repro.simulate.record import failed_record
from tests.records import changed

CONTEXT = 1e9
SMALL, LARGE = 4e9, 8e9


def record(tp: int, pp: int, need: float, memory: float, suite: str = "yuan") -> ExperimentRecord:
    """Return a simulated record with invented memory."""
    e = Experiment(
        name=f"map-{memory:.0f}-t{tp}-p{pp}",
        model=replace(synthetic.MODEL, heads=16, hidden=64, layers=16),
        layout=Layout(tp=tp, pp=pp, dp=16 // (tp * pp), global_batch=16),
        system=f"of-{memory:.0f}",
    )
    fits = need + CONTEXT <= memory
    metrics = {"memory.peak_bytes": need - 1e8, "memory.limit_bytes": memory - CONTEXT}
    metrics |= {"memory.context_bytes": CONTEXT} | ({"memory.reserved_bytes": need} if fits else {})
    made = failed_record(e, "", suite=suite, wall_s=0.1)
    system = {"system": f"of-{memory:.0f}", "memory_bytes": memory}
    return changed(made, outcome="ok" if fits else "oom", metrics=metrics, simulated_on=system)


def record_pair(tp: int, pp: int, need: float) -> list[ExperimentRecord]:
    return [record(tp, pp, need, LARGE), record(tp, pp, need, SMALL)]


def drawn(records: list[ExperimentRecord]) -> Drawing:
    with figure_style():
        return layout_fit.draw_maps(records)


def texts(drawing: Drawing, panel: int) -> list[str]:
    assert drawing.figure is not None
    return [text.get_text() for text in drawing.figure.axes[panel].texts]


def test_map_without_simulated_records_names_the_command() -> None:
    other = [record(1, 1, 1e9, SMALL, suite="smoke"), *select(synthetic.records()).measured]
    failed = changed(record(1, 1, 1e9, SMALL), outcome="error")
    for records in ([], other, [failed]):
        drawing = drawn(records)
        assert (drawing.figure, drawing.records, drawing.missing) == (None, (), layout_fit.MAP.missing)


def test_each_record_is_at_its_degrees_in_its_panel() -> None:
    drawing = drawn([*record_pair(1, 1, 9e9), *record_pair(2, 1, 5e9), *record_pair(1, 2, 2e9)])
    assert drawing.figure is not None
    assert [axes.get_title("left") for axes in drawing.figure.axes] == [
        "4 GB (of-4000000000)",
        "8 GB (of-8000000000)",
    ]
    missing = ["no such\nlayout"]
    small = ["5.9 GB\nd = 8, does not fit", "9.9 GB\nd = 16, does not fit", "3 GB\nd = 8, fits"]
    large = ["6 GB\nd = 8, fits", "9.9 GB\nd = 16, does not fit", "3 GB\nd = 8, fits"]
    assert (texts(drawing, 0), texts(drawing, 1)) == (small + missing, large + missing)
    assert (len(drawing.records), drawing.missing, drawing.evidence) == (6, "", "simulated")
    axes = drawing.figure.axes[0]
    across, down = (
        [label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
    )
    positions = {text.get_text(): tuple(map(int, text.get_position())) for text in axes.texts}
    assert {texts: (across[x], down[y]) for texts, (x, y) in positions.items()} == {
        small[0]: ("p = 1", "t = 2"),
        small[1]: ("p = 1", "t = 1"),
        small[2]: ("p = 2", "t = 1"),
        missing[0]: ("p = 2", "t = 2"),
    }


def test_layouts_that_do_not_fit_are_never_blue() -> None:
    """Live bytes may be below the limit, because the allocator reserves more than the live bytes."""
    drawing = drawn([record(1, 1, 3.05e9, SMALL), record(2, 1, 2.95e9, SMALL)])
    assert drawing.figure is not None
    axes = drawing.figure.axes[0]
    assert texts(drawing, 0) == ["3.95 GB\nd = 8, fits", "3.95 GB\nd = 16, does not fit"]
    fits, not_fits = axes.collections[0].get_facecolors()
    assert fits[2] > fits[0]
    assert not_fits[2] < not_fits[0]


def test_incomplete_map_names_the_command_for_missing_records() -> None:
    one = [record(1, 1, 9e9, SMALL), record(2, 1, 5e9, SMALL)]
    assert drawn(one).missing == layout_fit.MAP.missing
    assert drawn([*one, record(1, 1, 9e9, LARGE)]).missing == layout_fit.MAP.missing
    assert drawn([*one, record(1, 1, 9e9, LARGE), record(2, 1, 5e9, LARGE)]).missing == ""


def test_page_links_to_the_records_of_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.report.figures.draw_all", lambda _, __, simulated, *of: [drawn(simulated)])
    with Store(tmp_path / "results") as store:
        for made in record_pair(2, 2, 2e9):
            store.append(replace(made, provenance=synthetic.PROVENANCE))
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert {"map.svg", "map.png"} <= {path.name for path in report.figures}
    page, data = (
        (tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("source-yuan.html", "records.js")
    )
    assert page.count('href="experiments.html#sim-yuan.map-4000000000-t2-p2"') == 1
    assert data.count('"sim-yuan.map-4000000000-t2-p2"') == 1
    assert draw_all([], [])[-1].figure is None
