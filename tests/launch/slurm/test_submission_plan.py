"""All that a dry run prints, and the same as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config.suites import load_suite
from repro.launch.slurm import profile
from repro.launch.slurm.submission import submission_plan
from repro.launch.slurm.submission.submission_plan import SubmissionPlan, plan_submission
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.records import made_up

FAR = 'system = "dgx2"\nlayout.dp = 16\n'
BODY = experiments("a", "b", "known", "runs") + experiments("c4", extra="layout.dp = 4\n")
BODY += experiments("far", "further", extra=FAR)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `sbatch` gets has tests of its own."""
    monkeypatch.setattr(submission_plan, "_text", lambda planned, results, place, array: f"SCRIPT {place}")


def intended(folder: Path, site: Path, *only: str) -> SubmissionPlan:
    suite = write_suite(folder, BODY)
    keys = {entry.experiment.name: entry.experiment.key for entry in load_suite(suite).entries}
    with Store(folder / "results") as store:
        store.append(made_up("known", key=keys["known"]))
        return plan_submission(
            suite, profile.load_profile(site), store, only=list(only), running={keys["runs"]: "12_3"}
        )


def test_what_is_printed(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submission_plan.print_submission_plan(intended(tmp_path, site), tmp_path, json=False)
    assert capsys.readouterr().out.splitlines() == [
        "# array 0: 1 case in 1 job of 2 nodes x 2 ranks, 00:30:00 each, partition debug",
        "#   c4",
        "SCRIPT 0",
        "# array 1: 2 cases in 2 jobs of 1 node x 2 ranks, 00:30:00 each, partition debug",
        "#   a",
        "#   b",
        "SCRIPT 1",
        "runs: job 12_3 is at it",
        "1 in the store already (--rerun runs them again)",
        "2 not for nodes of local: far needs 16 devices of system dgx2, ...",
        # Half an hour of four ranks on two nodes, and two half hours of two ranks on one.
        "3 cases in 2 job arrays; at most 4 core-hours",
        "nothing was submitted (--dry-run)",
    ]
    submission_plan.print_submission_plan(intended(tmp_path, site, "known", "far"), tmp_path, json=False)
    assert capsys.readouterr().out.splitlines() == [
        "1 in the store already (--rerun runs them again)",
        "1 not for nodes of local: far needs 16 devices of system dgx2",
        "0 cases in 0 job arrays; at most 0 core-hours",
        "nothing was submitted (--dry-run)",
    ]
    site.write_text('system = "dgx2"\n[slurm]\ngpus_per_node = 16\ntime_limit = "90"\n')
    submission_plan.print_submission_plan(intended(tmp_path, site, "further"), tmp_path, json=False)
    assert capsys.readouterr().out.splitlines() == [
        "# array 0: 1 case in 1 job of 1 node x 16 ranks, 01:30:00 each",
        "#   further",
        "SCRIPT 0",
        "1 case in 1 job array; at most 24 GPU-hours",
        "no predicted times in the store: `repro run SUITE --evidence simulated` makes them",
        "nothing was submitted (--dry-run)",
    ]


def test_the_same_as_data(site: Path, tmp_path: Path) -> None:
    site.write_text("price_per_gpu_hour = 0.5\n" + site.read_text())
    shape = {"tasks_per_node": 2, "time_limit_s": 1800.0, "partition": "debug"}
    assert submission_plan.dry_run_document(intended(tmp_path, site), tmp_path) == {
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
