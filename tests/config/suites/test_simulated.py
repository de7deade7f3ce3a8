"""Tests that every experiment of every suite can be simulated at its size.

Tracing all experiments takes minutes, so these tests trace a small experiment of every kind and check the inputs of
all other traces. `make smoke` and the suites trace the other experiments.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import Experiment
from repro.launch.simulated import missing_for_simulation, simulate_experiment, simulated_system
from repro.simulate.placement import Placement
from repro.simulate.trace.roles import roles, shortened
from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"
ENTRIES = {
    f"{suite.name}/{entry.experiment.name}": entry
    for suite in (committed.suite(path) for path in sorted(FOLDER.glob("*.toml")))
    for entry in suite.entries
}
SMALL = (
    *("smoke/states-z3-dp4", "smoke/parity-3d", "smoke/limit-z0-dp2", "smoke/limit-z3-dp2"),
    *("megatron_2021/twin-3d", "megatron_2021/table1-1.7b", "yuan/twin-deep", "zero_r/twin-c5"),
    *("zero_memory/7.5b-z2-n64", "zero_memory/7.5b-z3-n1024", "zero_memory/fig4-dp-1.16b"),
)


@pytest.mark.parametrize("name", SMALL)
def test_small_experiment_of_every_kind_is_simulated(name: str) -> None:
    entry = ENTRIES[name]
    record = simulate_experiment(entry.experiment, simulated_system(entry.experiment), "any")
    assert record.outcome == entry.expect, record.reason
    assert record.metrics["memory.peak_bytes"] > record.metrics["memory.states_bytes"] > 0
    if entry.experiment.layout.world > 1:
        assert record.metrics["comm.sent_bytes"] > 0


def test_all_experiments_have_the_inputs_of_a_trace() -> None:
    for name, entry in ENTRIES.items():
        experiment = entry.experiment
        if missing_for_simulation(experiment):
            assert experiment.engine != "native", name
            continue
        found = roles(experiment)
        assert sum(role.stages for role in found) == experiment.layout.pp, name
        for role in found:
            short = shortened(experiment.layout, role.stage)
            assert short.accumulation <= experiment.layout.accumulation
        placement = Placement(experiment.layout, simulated_system(experiment))
        assert all(placement.links(0).values()), name


def test_system_of_a_simulated_twin_has_unlimited_memory() -> None:
    experiment: Experiment = ENTRIES["zero_r/twin-c1"].experiment
    system = simulated_system(experiment)
    assert (system.device.memory_bytes.value, system.context(), system.link_inside()) == (None, 0, "memory")
