"""Tests of the SLURM resources of suites: published experiments on cluster profiles, and twins on the lab profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import Experiment
from repro.config.suites import Suite
from repro.config.systems import load_system_file as load_system
from repro.launch.slurm import profile
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.submission import submission_plan
from repro.launch.slurm.submission.submission_plan import plan_submission
from repro.results.store import Store
from tests import committed

ROOT = Path(__file__).parents[3]
PROFILES = {path.stem: profile.load_profile(path) for path in sorted((ROOT / "slurm").glob("*.toml"))}
SUITES = {
    path.stem: committed.suite(path)
    for path in sorted((ROOT / "suites").glob("*.toml"))
    if path.stem not in ("one_gpu", "gpu_day") and not path.stem.startswith("windtunnel_")
}
"""Suites that run on clusters: all except those of one local GPU, which has no profile, and of emulated networks,
which run on one machine."""
LAB_SUITES = [suite for name, suite in SUITES.items() if name not in ("slow_links", "again")]
"""Suites with twins for the lab. Twins of `slow_links` are separate suites, and `again` is only simulated."""
LAB_RANKS = 8
"""Ranks of the lab: four nodes with two ranks each."""


def cluster_profile(system: str) -> Profile:
    """Return the profile for clusters of `system`."""
    found = [site for name, site in PROFILES.items() if site.system == system and name != "generic"]
    assert len(found) == 1, f"{len(found)} profiles for {system}"
    return found[0]


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_every_experiment_has_a_profile_with_enough_resources(suite: Suite, tmp_path: Path) -> None:
    """The dry runs with the cluster profiles of all systems plan every experiment of the suite once."""
    planned, names = list[str](), sorted(entry.experiment.name for entry in suite.entries)
    for system in {entry.experiment.system for entry in suite.entries}:
        site = cluster_profile(system)
        intent = plan_submission(Path(suite.file), site, Store(tmp_path), only=[])
        document = submission_plan.dry_run_document(intent, tmp_path)
        planned += document["cases"]
        assert sorted([*document["cases"], *document["not_for_this_profile"]]) == names
        for array, row in zip(intent.arrays, document["arrays"], strict=True):
            assert f"#SBATCH --nodes={array.shape.nodes}\n" in row["script"]
            assert array.shape.tasks_per_node <= site.ranks_per_node
            if site.slurm.gpus_per_node:
                # An experiment that needs several nodes uses all GPUs of each node.
                assert array.shape.nodes == 1 or array.shape.tasks_per_node == site.slurm.gpus_per_node
            for experiment in (e for bundle in array.bundles for e in bundle.experiments):
                # The harness times out before SLURM; experiments without a timeout get at least a day and 10 requeues.
                assert experiment.limits.timeout_s <= 60 * array.shape.time_min
                if not experiment.limits.timeout_s:
                    assert array.shape.time_min >= 24 * 60
                    assert array.shape.requeues >= 10
    assert sorted(planned) == names


def strategy(experiment: Experiment) -> set[str]:
    """Return the features of an experiment that have separate code, without the parallel degrees."""
    layout = experiment.layout
    found = {axis for axis in ("tp", "pp") if getattr(layout, axis) > 1}
    found |= {f"zero {layout.zero}"} if layout.dp > 1 else set()
    switches = ("pa", "pa_cpu", "md", "sp", "recompute", "scatter_gather")
    found |= {switch for switch in switches if getattr(layout, switch)}
    found |= {layout.schedule} if layout.pp > 1 else set()
    found |= set() if layout.overlap else {"no overlap"}
    found |= set() if layout.gradient_as_bucket_view else {"buckets beside gradients"}
    found |= {"checkpoints"} if experiment.training.checkpoint_every else set()
    return found | {f"{layout.kernels} kernels", experiment.engine}


@pytest.mark.parametrize("suite", LAB_SUITES, ids=lambda suite: suite.name)
def test_twins_fit_the_lab_and_have_every_published_strategy(suite: Suite, tmp_path: Path) -> None:
    intent = plan_submission(Path(suite.file), PROFILES["lab"], Store(tmp_path), only=[])
    assert max(experiment.layout.world for experiment in intent.cases) <= LAB_RANKS
    assert all(array.shape.nodes <= 4 for array in intent.arrays)
    cases = [entry.experiment for entry in suite.entries]
    published = set().union(*(strategy(e) for e in cases if e.system != "local"))
    assert published <= set().union(*(strategy(e) for e in cases if e.system == "local"))


def test_cluster_profiles_use_all_gpus_of_a_node() -> None:
    for name, site in PROFILES.items():
        if name not in ("generic", "lab"):
            assert site.slurm.gpus_per_node == load_system(site.system).devices_per_node.value, name
