"""Tests of the plan of a submission: job arrays, and output and JSON document of `repro submit --dry-run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config.suites import load_suite
from repro.launch import plan
from repro.launch.slurm import profile
from repro.launch.slurm.submission import submission_plan
from repro.launch.slurm.submission.job_array import count_nodes, pack_arrays
from repro.launch.slurm.submission.submission_plan import SubmissionPlan, plan_submission
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.records import made_up

OTHER_SYSTEM = 'system = "dgx2"\nlayout.dp = 16\n'
BODY = experiments("a", "b", "known", "runs") + experiments("c4", extra="layout.dp = 4\n")
BODY += experiments("far", "further", extra=OTHER_SYSTEM)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scripts for `sbatch`, which other tests check."""
    monkeypatch.setattr(submission_plan, "_text", lambda planned, results, place, array: f"SCRIPT {place}")


def make_plan(folder: Path, site: Path, *only: str) -> SubmissionPlan:
    suite = write_suite(folder, BODY)
    keys = {entry.experiment.name: entry.experiment.key for entry in load_suite(suite).entries}
    with Store(folder / "results") as store:
        store.append(made_up("known", key=keys["known"]))
        running = {keys["runs"]: "12_3"}
        return plan_submission(suite, profile.load_profile(site), store, only=list(only), running=running)


def printed(planned: SubmissionPlan, capsys: pytest.CaptureFixture[str], details: bool = False) -> list[str]:
    submission_plan.print_submission_plan(planned, Path("results"), json=False, details=details)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_dry_run_prints_all_sections(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = make_plan(tmp_path, site)
    answer = [
        "Dry run: 3 cases in 2 job arrays. Nothing is submitted.",
        # 0.5 h of 4 ranks on 2 nodes, and 2 x 0.5 h of 2 ranks on 1 node.
        "Maximum cost, if all jobs reach their time limits: 4 core-hours.",
        "1 case in a live job: runs (job 12_3)",
        "1 case with a record; --rerun submits cases with a record again",
        "2 cases that nodes of local cannot run: far needs 16 devices of system dgx2, ...",
    ]
    assert printed(planned, capsys) == [
        *answer,
        "",
        "array  jobs",
        "0      1 case in 1 job of 2 nodes x 2 ranks, time limit 00:30:00, partition debug",
        "1      2 cases in 2 jobs of 1 node x 2 ranks, time limit 00:30:00, partition debug",
        "",
        "0 more arrays; --details prints the cases and scripts of all arrays",
    ]
    assert printed(planned, capsys, details=True) == [
        *answer,
        "# array 0: 1 case in 1 job of 2 nodes x 2 ranks, time limit 00:30:00, partition debug",
        "#   c4",
        "SCRIPT 0",
        "# array 1: 2 cases in 2 jobs of 1 node x 2 ranks, time limit 00:30:00, partition debug",
        "#   a",
        "#   b",
        "SCRIPT 1",
    ]
    many = replace(planned, arrays=planned.arrays * 40, running={f"case-{i}": "12" for i in range(50)})
    lines = printed(many, capsys)
    assert len(lines) <= 24, "the answer fits one screen"
    assert "50 cases in a live job: case-0 (job 12), case-1 (job 12), case-2 (job 12), ..." in lines
    assert lines[-1] == "68 more arrays; --details prints the cases and scripts of all arrays"
    assert printed(make_plan(tmp_path, site, "known", "far"), capsys) == [
        "Dry run: 0 cases in 0 job arrays. Nothing is submitted.",
        "Maximum cost, if all jobs reach their time limits: 0 core-hours.",
        "1 case with a record; --rerun submits cases with a record again",
        "1 case that nodes of local cannot run: far needs 16 devices of system dgx2",
        "0 more arrays; --details prints the cases and scripts of all arrays",
    ]
    site.write_text('system = "dgx2"\n[slurm]\ngpus_per_node = 16\ntime_limit = "90"\n')
    planned = make_plan(tmp_path, site, "further")
    assert printed(planned, capsys) == [
        "Dry run: 1 case in 1 job array. Nothing is submitted.",
        "Maximum cost, if all jobs reach their time limits: 24 GPU-hours.",
        "No step time is predicted: run `repro run SUITE --evidence simulated` first.",
        "",
        "array  jobs",
        "0      1 case in 1 job of 1 node x 16 ranks, time limit 01:30:00",
        "",
        "0 more arrays; --details prints the cases and scripts of all arrays",
    ]


def test_dry_run_document_contains_all_cases(site: Path, tmp_path: Path) -> None:
    site.write_text("price_per_gpu_hour = 0.5\n" + site.read_text())
    shape = {"tasks_per_node": 2, "time_limit_s": 1800.0, "partition": "debug"}
    assert submission_plan.dry_run_document(make_plan(tmp_path, site), tmp_path) == {
        "arrays": [
            {"nodes": 2, **shape, "bundles": [["c4"]], "script": "SCRIPT 0"},
            {"nodes": 1, **shape, "bundles": [["a"], ["b"]], "script": "SCRIPT 1"},
        ],
        "cases": ["c4", "a", "b"],
        "gpu_hours": {"most": 4.0, "predicted": 0, "predicted_cases": 0},
        "price": 2.0,
        "not_for_this_profile": dict.fromkeys(("far", "further"), "16 devices of system dgx2"),
        "known": ["known"],
        "running": {"runs": "12_3"},
        "predicted_out_of_memory": [],
    }


@given(st.integers(1, 3072), st.integers(1, 16), st.integers(0, 8))
def test_ranks_are_spread_evenly_over_the_fewest_nodes(world: int, per_node: int, at_least: int) -> None:
    nodes = count_nodes(world, per_node, at_least)
    assert world % nodes == 0
    assert world // nodes <= per_node
    assert nodes >= min(at_least, world)
    for fewer in range(max(min(at_least, world), 1), nodes):
        assert world % fewer or world // fewer > per_node


def test_cases_of_equal_shape_share_an_array(site: Path, tmp_path: Path) -> None:
    body = experiments("a", "b", "c") + experiments("d4", "e4", extra="layout.dp = 4\n")
    body += '\n[[experiment]]\nname = "f"\nlayout.zero = 1\n[[compare]]\nbaseline = "a"\nsubjects = ["f"]\n'
    suite = load_suite(write_suite(tmp_path, body))
    site.write_text('[slurm]\ntasks_per_node = 2\ncases_per_job = 2\n[[case]]\nmatch = "c"\nnodes = 2\n')
    tasks = plan.plan_tasks(suite, list(suite.entries), Store(tmp_path / "results"), rerun=False)
    found = pack_arrays(tasks, profile.load_profile(site))
    shapes = [(array.shape.nodes, array.shape.tasks_per_node) for array in found]
    assert shapes == [(2, 2), (2, 1), (1, 2)]
    names = [[e.name for e in bundle.experiments] for array in found for bundle in array.bundles]
    assert names == [["d4", "e4"], ["c"], ["a", "f", "b"]]
    assert [b.index for array in found for b in array.bundles] == [0, 1, 2]
