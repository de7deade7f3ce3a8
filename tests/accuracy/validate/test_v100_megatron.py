"""Megatron-LM on V100, every published rate that calibrates nothing: how far off, and which the interval holds.

`repro validate` prints the same after the suites were simulated.
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

FOLDER = Path(__file__).parents[3] / "suites"


def on_v100_without_zero(experiment: Experiment) -> bool:
    if experiment.system in systems.LOCAL_SYSTEMS or experiment.engine != "native" or experiment.layout.zero:
        return False
    return systems.load_system_file(experiment.system).device.compute_capability == "7.0"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_are_within_a_fifth_and_half_are_held_by_what_inputs_leave_open() -> None:
    ledger = committed.ledger()
    everything = {
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
        experiment = everything[name]
        if on_v100_without_zero(experiment):
            system = systems.load_system_file(experiment.system)
            found = simulate(experiment, system, time=True, interval=True)
            records.append(
                simulated_record(experiment, found, system, suite=name.partition("/")[0], wall_s=0.0)
            )
    seen = points(judge(ledger, records), records)
    (family,) = (one for one in family_statistics(seen) if one.name == V100_MEGATRON)
    rates = [point for point in seen if point.kind == RATE and not point.left_out]
    errors = {point.name: point.error for point in rates}
    elsewhere = {name: error for name, error in errors.items() if name.startswith(("oneflow", "bigscience"))}
    assert (len(errors) - len(elsewhere), len(elsewhere)) == (27, 17)
    assert family.median <= 0.2, errors
    assert median(map(abs, elsewhere.values())) <= 0.1, elsewhere
    held = {point.name: point.holds for point in rates}
    assert family.held > family.points / 2, held
