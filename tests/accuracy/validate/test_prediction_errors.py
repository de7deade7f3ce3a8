"""Tests of errors and coverage of predicted rates: Megatron-LM on V100, and devices without their calibration.

`repro validate` prints the numbers of Megatron-LM after a simulation of the suites.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from repro.accuracy.validate.published import DIRECT, RATE, TIMED, V100_MEGATRON, family_statistics, points
from repro.claims.judge import experiments_read, judge
from repro.config import Experiment, systems
from repro.simulate.record import simulated_record
from repro.simulate.step import simulate
from tests import committed
from tests.accuracy.validate.leave_one_out import DEVICES, predicted_rates

FOLDER = Path(__file__).parents[3] / "suites"


def on_v100_without_zero(experiment: Experiment) -> bool:
    if experiment.system in systems.LOCAL_SYSTEMS or experiment.engine != "native" or experiment.layout.zero:
        return False
    return systems.load_system_file(experiment.system).device.compute_capability == "7.0"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_median_error_is_20_percent_and_half_are_covered() -> None:
    ledger = committed.ledger()
    experiments = {
        f"{suite.name}/{entry.experiment.name}": entry.experiment
        for suite in map(committed.suite, sorted(FOLDER.glob("*.toml")))
        for entry in suite.entries
    }
    read = {
        name
        for claim in ledger.claims
        for row in claim.rows
        if row.unit in DIRECT
        for evidence in row.evidence
        if evidence.kind == "simulated" and any(metric in evidence.value.text for metric in TIMED)
        for name in experiments_read(evidence.value, row.variables)
    }
    records = []
    for name in sorted(read):
        experiment = experiments[name]
        if on_v100_without_zero(experiment):
            system = systems.load_system_file(experiment.system)
            found = simulate(experiment, system, time=True, interval=True)
            records.append(
                simulated_record(experiment, found, system, suite=name.partition("/")[0], wall_s=0.0)
            )
    all_points = points(judge(ledger, records), records)
    (family,) = (one for one in family_statistics(all_points) if one.name == V100_MEGATRON)
    rates = [point for point in all_points if point.kind == RATE and not point.left_out]
    errors = {point.name: point.error for point in rates}
    elsewhere = {name: error for name, error in errors.items() if name.startswith(("oneflow", "bigscience"))}
    assert (len(errors) - len(elsewhere), len(elsewhere)) == (27, 17)
    assert family.median <= 0.2, errors
    assert median(map(abs, elsewhere.values())) <= 0.1, elsewhere
    covered = {point.name: point.holds for point in rates}
    assert family.held > family.points / 2, covered


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_intervals_without_calibration_cover_published_rates(device: str) -> None:
    """A sample of the rates; the module prints the table of docs/accuracy.md with all of them."""
    rates = predicted_rates(device, step=3)
    assert len(rates) >= 10
    covered = sum(rate.holds for rate in rates)
    assert covered >= 0.7 * len(rates), [rate.name for rate in rates if not rate.holds]
    assert {rate.rests_on for rate in rates} - {""} == {"uncalibrated"}, (
        "a step that does not fit has no calibration"
    )
