"""Every experiment of every suite can be simulated at its own size.

Tracing all of them takes minutes of processor time, so a small one of every kind is traced here, and of all
others what a trace needs before it starts; `make smoke` and the suites themselves trace the rest.
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
EVERYTHING = {
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
def test_a_small_one_of_every_kind_is_simulated(name: str) -> None:
    entry = EVERYTHING[name]
    record = simulate_experiment(entry.experiment, simulated_system(entry.experiment), "any")
    assert record.outcome == entry.expect, record.reason
    assert record.metrics["memory.peak_bytes"] > record.metrics["memory.states_bytes"] > 0
    if entry.experiment.layout.world > 1:
        assert record.metrics["comm.sent_bytes"] > 0


def test_all_others_have_all_that_a_trace_needs() -> None:
    for name, entry in EVERYTHING.items():
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


def test_a_simulated_twin_needs_no_machine_in_particular() -> None:
    experiment: Experiment = EVERYTHING["zero_r/twin-c1"].experiment
    system = simulated_system(experiment)
    assert (system.device.memory_bytes.value, system.context(), system.link_inside()) == (None, 0, "memory")
