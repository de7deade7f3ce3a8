"""Tests of errors and coverage of predicted rates: Megatron-LM on V100, and devices without their calibration.

`python -m tests.accuracy.validate.test_prediction_errors` prints the table of docs/accuracy.md in some minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import pytest

from repro.accuracy.validate import published
from repro.accuracy.validate.published import RATE, Point, points
from repro.claims.judge import experiments_read, judge
from repro.config import Experiment, systems
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.launch.simulated import simulate_experiment, simulated_system
from repro.simulate.time import calibration
from repro.simulate.time.calibration import Generation, MeasuredKernels
from repro.simulate.time.predict import calibrated_kernels
from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"
SUITE_NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
SUITES = (
    *("zero_memory", "turing_nlg", "deepspeed_lowbw", "deepspeed_64gpu", "deepspeed_dgx2", "zero_throughput"),
    *("zero_superlinear", "megatron_2019", "megatron_2021", "megatron_figures", "v100_clusters"),
    *("a100_clusters", "yuan", "one_node", "today", "b200", "a100_pcie"),
)
"""Suites with the experiments of published rates, for devices without their calibration."""
DEVICES = {"V100": "7.0", "A100": "8.0", "H100": "9.0", "B200": "10.0"}
PEAKS = {"7.0": 125e12, "8.0": 312e12, "9.0": 989.4e12, "10.0": 2250e12}
"""FLOP/s of 16-bit products by compute capability, from the data sheets."""


def published_experiments(capability: str, suites: Iterable[str]) -> list[tuple[str, Experiment, System]]:
    """Return the experiments of `suites` on packaged systems of a compute capability, each with suite and system."""
    found = [
        (suite, entry.experiment, simulated_system(entry.experiment))
        for suite in suites
        for entry in committed.suite(FOLDER / f"{suite}.toml").entries
        if entry.experiment.system in systems.system_names()
    ]
    return [one for one in found if one[2].device.compute_capability == capability]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_median_error_is_20_percent_and_half_are_covered() -> None:
    ledger = committed.ledger()
    read = {
        name
        for claim in ledger.claims
        for row in claim.rows
        if row.unit in published.DIRECT
        for evidence in row.evidence
        if evidence.kind == "simulated" and any(metric in evidence.value.text for metric in published.TIMED)
        for name in experiments_read(evidence.value, row.variables)
    }
    records = [
        simulate_experiment(experiment, system, suite)
        for suite, experiment, system in published_experiments(DEVICES["V100"], SUITE_NAMES)
        if experiment.engine == "native"
        and not experiment.layout.zero
        and f"{suite}/{experiment.name}" in read
    ]
    all_points = points(judge(ledger, records), records)
    families = {one.name: one for one in published.family_statistics(all_points)}
    family = families[published.V100_MEGATRON]
    rates = [point for point in all_points if point.kind == RATE and not point.left_out]
    errors = {point.name: point.error for point in rates}
    elsewhere = {name: error for name, error in errors.items() if name.startswith(("oneflow", "bigscience"))}
    assert (len(errors) - len(elsewhere), len(elsewhere)) == (27, 17)
    assert family.median <= 0.2, errors
    assert median(map(abs, elsewhere.values())) <= 0.1, elsewhere
    assert family.held > family.points / 2, {point.name: point.holds for point in rates}


def quantity_of(values: Sequence[float], scale: float = 1.0) -> Quantity:
    """Return the median of `values`, with ends twice as far on a logarithmic scale as the minimum and maximum."""
    middle = median(values)
    ends = (min(values) ** 2 / middle * scale, max(values) ** 2 / middle * scale)
    source = "other devices; low: other devices; high: other devices"
    return Quantity(value=middle * scale, low=ends[0], high=ends[1], source=source)


def kernels_of_others(generations: Sequence[Generation], capability: str) -> MeasuredKernels:
    """Return the range that the calibrations of other devices give for a device of this compute capability."""
    kernels = [calibrated_kernels(generation) for generation in generations]
    shares = [
        one.attention / PEAKS[generation.compute_capability]
        for one, generation in zip(kernels, generations, strict=True)
        if one.attention
    ]
    return replace(
        calibration.uncalibrated_kernels(systems.load_system_file("dgx-b200")),
        products=quantity_of([one.products for one in kernels]),
        others=quantity_of([one.others for one in kernels]),
        passes=quantity_of([one.passes for one in kernels]),
        attention=quantity_of(shares, PEAKS[capability]),
    )


def predicted_rates(device: str, step: int = 1) -> list[Point]:
    """Return every `step`-th published rate of `device`, predicted without its calibration."""
    capability = DEVICES[device]
    generations = [*calibration.calibration_points(), *calibration.measured_kernels()]
    others = [one for one in generations if one.compute_capability != capability]
    found = kernels_of_others(others, capability)
    on_device = published_experiments(capability, SUITES)
    points_of_others = tuple(one for one in others if isinstance(one, calibration.CalibrationPoint))
    measured_on_others = tuple(one for one in others if isinstance(one, MeasuredKernels))
    with (
        patch.object(calibration, "uncalibrated_kernels", lambda system: found),
        patch.object(calibration, "calibration_points", lambda: points_of_others),
        patch.object(calibration, "measured_kernels", lambda: measured_on_others),
    ):
        records = [
            simulate_experiment(experiment, system, suite) for suite, experiment, system in on_device[::step]
        ]
        judged = judge(committed.ledger(), records)
        return [one for one in points(judged, records) if one.kind == RATE and not one.left_out]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_intervals_without_calibration_cover_published_rates(device: str) -> None:
    """The device's kernels get the range that the calibrations of the other devices give. The test has a sample."""
    rates = predicted_rates(device, step=3)
    assert len(rates) >= 10
    covered = sum(rate.holds for rate in rates)
    assert covered >= 0.7 * len(rates), [rate.name for rate in rates if not rate.holds]
    # A step that does not fit has no calibration.
    assert {rate.rests_on for rate in rates} - {""} == {"uncalibrated"}


if __name__ == "__main__":
    for device in DEVICES:
        rates = predicted_rates(device)
        covered, error = sum(rate.holds for rate in rates), median(abs(rate.error) for rate in rates)
        print(f"| {device} | {len(rates)} | {covered} | {100 * error:.1f} |", flush=True)
