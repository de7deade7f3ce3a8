"""What predictions rest on: of a record, of several together, and how many of each."""

from __future__ import annotations

import pytest

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


def record(system: str, **differs: object) -> ExperimentRecord:
    """A simulated step of a tiny model with the fused kernels, which took a second."""
    experiment = Experiment(
        name="x", model=models.load_model("tiny-stages"), layout=Layout(precision="fp16"), system=system
    )
    made = failed_record(experiment, "", suite="s", wall_s=0.1)
    return changed(made, **{"outcome": "ok", "metrics": {"step_seconds.median": 1.0}, **differs})


@pytest.mark.parametrize(
    ("system", "basis"),
    [
        ("dgx-h100", PUBLISHED_POINT),
        ("dgx-h200", KERNEL_TIMES),
        ("yuan", PUBLISHED_POINT),
        ("dgx2", UNCALIBRATED),
        ("dgx-b200", UNCALIBRATED),
        ("gb200-nvl72", UNCALIBRATED),
        ("mi300x", UNCALIBRATED),
        ("gone.toml", ""),
    ],
)
def test_a_record_rests_on_what_its_system_is_known_by(system: str, basis: str) -> None:
    assert basis_of_record(record(system)) == basis


@pytest.mark.parametrize(
    "differs", [{"outcome": "oom"}, {"metrics": {}}, {"evidence": "measured"}], ids=lambda d: next(iter(d))
)
def test_what_was_not_predicted_rests_on_nothing(differs: dict[str, object]) -> None:
    assert basis_of_record(record("dgx-h100", **differs)) == ""


def test_a_record_on_an_h200_stands_for_the_kernel_times_that_it_rests_on() -> None:
    system = load_system_file("dgx-h200")
    facts = {kernels: simulation_facts(system, kernels) for kernels in OperatorSet}
    assert facts[OperatorSet.FUSED] == facts[OperatorSet.FUSED_2026]
    others = (OperatorSet.FUSED_2024, OperatorSet.REFERENCE)
    assert len({facts[kernels].numbers for kernels in (OperatorSet.FUSED, *others)}) == 3


def test_what_is_made_of_several_rests_on_the_weakest() -> None:
    assert weakest_basis([CALIBRATED, UNCALIBRATED, PUBLISHED_POINT]) == UNCALIBRATED
    assert weakest_basis([CALIBRATED, KERNEL_TIMES, PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([CALIBRATED, "", PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([]) == weakest_basis([""]) == ""


def test_they_are_counted_the_firmest_first() -> None:
    assert (
        count_bases([UNCALIBRATED, PUBLISHED_POINT, "", PUBLISHED_POINT])
        == "Times rest on: published point (2), uncalibrated (1)."
    )
    assert count_bases([""]) == ""
