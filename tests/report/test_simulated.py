"""Tests of simulated records on the page: they have their own rows and are in no figure of measured records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.config import Experiment, systems
from repro.launch.simulated import simulate_experiment
from repro.report.figures import draw_all, layout_fit
from repro.report.page.build import build_report
from repro.report.views import record_row
from repro.results.schema import ExperimentRecord
from repro.results.select import select
from repro.results.store import Store
from repro.results.tables import experiment_row
from repro.simulate.record import failed_record
from repro.simulate.time.calibration import BASES, PUBLISHED_POINT
from tests.report import synthetic
from tests.report.test_page import stored_rows
from tests.report.test_simulated_figures import map_record

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
    assert (tight["step_s"], tight["facts"]["Basis of the step time"]) == (None, ""), (
        "a step that does not fit has no time"
    )
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
