"""Tests of the packaged suites: valid files and claims, compared layouts, limits, and simulations at any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.config import models, systems
from repro.launch.simulated import missing_for_simulation, simulate_experiment, simulated_system
from repro.model.counts import total_parameters
from repro.simulate.placement import Placement
from repro.simulate.trace.roles import roles, shortened
from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"
PATHS = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_suite_is_valid_and_names_known_claims(path: Path) -> None:
    suite = committed.suite(path)
    assert suite.name == path.stem
    assert suite.description
    claims = {claim.id for claim in committed.ledger().claims}
    assert len(claims & set(suite.claims)) == len(suite.claims)


def test_compared_layouts_differ_only_in_their_operators() -> None:
    suite = committed.suite(FOLDER / "kernels.toml")
    assert len(suite.comparisons) == 7
    for comparison in suite.comparisons:
        members = [suite.entry(name).experiment for name in (comparison.baseline, *comparison.subjects)]
        assert len({e.layout.kernels for e in members}) == len(members) == 3
        assert len({replace(e.layout, kernels="fused") for e in members}) == 1


def test_every_engine_with_a_strategy_is_compared_with_native() -> None:
    suite = committed.suite(FOLDER / "engines.toml")
    compared = {row.baseline: set(row.subjects) for row in suite.comparisons}
    libraries = {"tp2": {"torch", "megatron"}, "pp2": {"torch", "megatron"}}
    libraries |= {f"z{z}": {"torch", "deepspeed"} | ({"megatron"} if z < 2 else set()) for z in range(4)}
    assert compared == {
        f"speed-native-{kind}": {f"speed-{name}-{kind}" for name in names}
        for kind, names in libraries.items()
    }


def test_smoke_memory_limit_is_a_fortieth_of_a_v100() -> None:
    """Both the memory of a V100 of a DGX-2 minus its context and the published model sizes are divided by 40."""
    suite = committed.suite(FOLDER / "smoke.toml")
    assert suite.entry("limit-z0-dp2").expect == "oom"
    assert all(entry.experiment.system == "local" for entry in suite.entries)
    v100 = systems.load_system_file("dgx2")
    full = v100.device.memory_bytes.known("memory") - v100.context()
    published = {"z0-dp2-1.16b": "zero-1.16b", "z0-dp2": "zero-1.5b", "z3-dp2": "zero-1.5b"}
    for name, model in published.items():
        experiment = suite.entry(f"limit-{name}").experiment
        assert experiment.limits.memory_bytes == int(full / 40)
        size = total_parameters(models.load_model(model)) / 40
        assert total_parameters(experiment.model) == pytest.approx(size, rel=1e-3)


ENTRIES = {
    f"{path.stem}/{entry.experiment.name}": entry for path in PATHS for entry in committed.suite(path).entries
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
    """Tracing all experiments takes minutes; `make smoke` and the suites trace them."""
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
    system = simulated_system(ENTRIES["zero_r/twin-c1"].experiment)
    assert (system.device.memory_bytes.value, system.context(), system.link_inside()) == (None, 0, "memory")
