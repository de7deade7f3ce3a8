"""Tests of job arrays: the number of nodes for the ranks, and one array for cases of equal shape."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from repro.config import suites
from repro.launch import plan
from repro.launch.slurm import profile
from repro.launch.slurm.allocation.bundle import SubmissionWork
from repro.launch.slurm.submission.job_array import count_nodes, pack_arrays
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite


@given(st.integers(1, 3072), st.integers(1, 16), st.integers(0, 8))
def test_ranks_are_spread_evenly_over_the_fewest_nodes(world: int, per_node: int, at_least: int) -> None:
    nodes = count_nodes(world, per_node, at_least)
    assert world % nodes == 0
    assert world // nodes <= per_node
    assert nodes >= min(at_least, world)
    for fewer in range(max(min(at_least, world), 1), nodes):
        assert world % fewer or world // fewer > per_node


def test_cases_of_equal_shape_share_an_array(tmp_path: Path) -> None:
    body = experiments("a", "b", "c") + experiments("d4", "e4", extra="layout.dp = 4\n")
    body += '\n[[experiment]]\nname = "f"\nlayout.zero = 1\n[[compare]]\nbaseline = "a"\nsubjects = ["f"]\n'
    suite = suites.load_suite(write_suite(tmp_path, body))
    site = tmp_path / "site.toml"
    site.write_text('[slurm]\ntasks_per_node = 2\ncases_per_job = 2\n[[case]]\nmatch = "c"\nnodes = 2\n')
    tasks = plan.plan_tasks(suite, list(suite.entries), Store(tmp_path / "results"), rerun=False)
    found = pack_arrays(tasks, profile.load_profile(site))
    shapes = {
        (array.shape.nodes, array.shape.tasks_per_node): [
            [e.name for e in bundle.experiments] for bundle in array.bundles
        ]
        for array in found
    }
    assert shapes == {(2, 2): [["d4", "e4"]], (2, 1): [["c"]], (1, 2): [["a", "f", "b"]]}
    assert [b.index for array in found for b in array.bundles] == [0, 1, 2]
    work = SubmissionWork(suite=suite, bundles=tuple(b for array in found for b in array.bundles), rerun=True)
    work.save(tmp_path)
    loaded = SubmissionWork.load(tmp_path)
    assert (loaded.bundles, loaded.rerun) == (work.bundles, True)
    assert [e.experiment for e in loaded.suite.entries] == [e.experiment for e in suite.entries]
