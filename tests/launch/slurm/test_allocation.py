"""An allocation does what a local run does, and survives what clusters do to it."""

from __future__ import annotations

from pathlib import Path

from tests.launch.runs import experiments, write_suite
from tests.launch.slurm.allocations import Srun, Submission


def test_a_bundle_runs_and_says_so(tmp_path: Path) -> None:
    submission = Submission(tmp_path, write_suite(tmp_path, experiments("a", "b")))
    srun = Srun(submission)
    assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}
    state = submission.state
    assert (state["phase"], state["nodes"], state["job"]) == ("ended", ["n1", "n2"], "7")
    slurm = submission.records()[0]["provenance"]["slurm"]
    assert slurm["nodes"] == ["n1", "n2"]
    assert slurm["tasks_per_node"] == 1
