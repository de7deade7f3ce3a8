"""Tests of the basis of predictions: of one record, of several records, and the number of each basis."""

from __future__ import annotations

from repro.config import Experiment, Layout, OperatorSet, models
from repro.config.systems import load_system_file
from repro.results.schema import ExperimentRecord
from repro.simulate.record import failed_record, simulation_facts
from repro.simulate.time.calibration import (
    CALIBRATED,
    KERNEL_TIMES,
    PUBLISHED_POINT,
    UNCALIBRATED,
    basis_of_record,
    count_bases,
    weakest_basis,
)
from tests.records import changed


def record(system: str, **changes: object) -> ExperimentRecord:
    """Return a record of a simulated step of 1 s, of a tiny model with fused kernels."""
    model, layout = models.load_model("tiny-stages"), Layout(precision="fp16")
    experiment = Experiment(name="x", model=model, layout=layout, system=system)
    failed = failed_record(experiment, "", suite="s", wall_s=0.1)
    return changed(failed, **{"outcome": "ok", "metrics": {"step_seconds.median": 1.0}, **changes})


def test_the_system_decides_the_basis_of_a_record() -> None:
    for systems, basis in {
        ("dgx-h100", "yuan"): PUBLISHED_POINT,
        ("dgx-h200",): KERNEL_TIMES,
        ("dgx2", "dgx-b200", "gb200-nvl72", "mi300x"): UNCALIBRATED,
        ("missing.toml",): "",
    }.items():
        assert {basis_of_record(record(system)) for system in systems} == {basis}


def test_a_record_without_predicted_time_has_no_basis() -> None:
    for changes in ({"outcome": "oom"}, {"metrics": {}}, {"evidence": "measured"}):
        assert basis_of_record(record("dgx-h100", **changes)) == "", changes


def test_simulation_facts_on_h200_depend_on_kernel_times() -> None:
    system = load_system_file("dgx-h200")
    facts = {kernels: simulation_facts(system, kernels) for kernels in OperatorSet}
    assert facts[OperatorSet.FUSED] == facts[OperatorSet.FUSED_2026]
    others = (OperatorSet.FUSED_2024, OperatorSet.REFERENCE)
    assert len({facts[kernels].numbers for kernels in (OperatorSet.FUSED, *others)}) == 3


def test_several_records_have_the_weakest_basis() -> None:
    assert weakest_basis([CALIBRATED, UNCALIBRATED, PUBLISHED_POINT]) == UNCALIBRATED
    assert weakest_basis([CALIBRATED, KERNEL_TIMES, PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([CALIBRATED, "", PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([]) == weakest_basis([""]) == ""


def test_bases_are_counted_from_the_strongest() -> None:
    counted = count_bases([UNCALIBRATED, PUBLISHED_POINT, "", PUBLISHED_POINT])
    assert counted == "Times rest on: published point (2), uncalibrated (1)."
    assert count_bases([""]) == ""
