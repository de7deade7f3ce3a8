"""Published cases on the ready profiles of clusters, twins on the lab's: what a submission would ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import suites
from repro.launch import plan
from repro.launch.slurm import pack, profile
from repro.launch.slurm.profile import Profile
from repro.results.store import Store
from repro.suites import Suite
from repro.systems import load as load_system

ROOT = Path(__file__).parents[2]
PROFILES = {path.stem: profile.load(path) for path in sorted((ROOT / "slurm").glob("*.toml"))}
SUITES = {path.stem: suites.load(path) for path in sorted((ROOT / "suites").glob("*.toml"))}
LAB_RANKS = 8
"""Four nodes of two."""


def ready(system: str) -> Profile:
    """The profile for clusters of ``system``."""
    found = [site for name, site in PROFILES.items() if site.system == system and name != "generic"]
    assert len(found) == 1, f"{len(found)} profiles for {system}"
    return found[0]


def of(suite: Suite, system: str, tmp_path: Path) -> list[plan.Task]:
    """What a submission of a suite to a cluster of ``system`` has to do."""
    entries = [entry for entry in suite.entries if entry.experiment.system == system]
    return plan.tasks(suite, entries, Store(tmp_path))


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_every_case_has_a_profile_with_room_and_time_for_it(suite: Suite, tmp_path: Path) -> None:
    for system in {entry.experiment.system for entry in suite.entries}:
        site = ready(system)
        tasks = of(suite, system, tmp_path)
        arrays = pack.arrays(tasks, site)
        cases = [e.name for array in arrays for bundle in array.bundles for e in bundle.experiments]
        assert sorted(cases) == sorted(e.name for task in tasks for e in task.experiments)
        for array in arrays:
            assert array.shape.tasks_per_node <= site.ranks_per_node
            for bundle in array.bundles:
                # The harness gives a case up, and says why, before SLURM does.
                assert all(e.limits.timeout_s <= 60 * array.shape.time_min for e in bundle.experiments)
                if site.gpus_per_node:
                    # Whole nodes wherever a case is larger than one.
                    assert array.shape.nodes == 1 or array.shape.tasks_per_node == site.gpus_per_node


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_the_lab_can_rehearse_it(suite: Suite, tmp_path: Path) -> None:
    tasks = of(suite, "local", tmp_path)
    assert tasks
    assert max(task.experiments[0].layout.world for task in tasks) <= LAB_RANKS
    assert all(array.shape.nodes <= 4 for array in pack.arrays(tasks, PROFILES["lab"]))


def test_ready_profiles_are_of_systems_and_use_whole_nodes() -> None:
    for name, site in PROFILES.items():
        if name not in ("generic", "lab"):
            assert site.gpus_per_node == load_system(site.system).devices_per_node.value, name
