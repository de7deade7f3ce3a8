"""What SLURM's commands print, as data; few calls, however many jobs."""

from __future__ import annotations

import pytest

from repro.launch.slurm.site.scheduler import Scheduler, SchedulerError, expand
from tests.launch.slurm.conftest import FakeSlurm

JOB = {"state": "RUNNING", "reason": "None", "nodes": "n[1-2]", "exit": "0:0"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[0-2,5%4]", ["12_0", "12_1", "12_2", "12_5"]),
        ("12_[7]", ["12_7"]),
        ("12.batch", ["12.batch"]),
    ],
)
def test_elements_of_an_array(written: str, meant: list[str]) -> None:
    assert expand(written) == meant


def test_hundreds_of_jobs_take_two_calls(slurm: FakeSlurm) -> None:
    jobs = {f"12_{i}": JOB for i in range(250)} | {
        f"13_{i}": {**JOB, "state": "COMPLETED", "forgotten": True} for i in range(250)
    }
    slurm.set(jobs=jobs)
    found = Scheduler().jobs(jobs)
    assert {key: job.state for key, job in found.items()} == {key: job["state"] for key, job in jobs.items()}
    assert found["12_0"].nodes == "n[1-2]"
    assert len(slurm.calls("squeue")) == len(slurm.calls("sacct")) == 1


def test_how_a_job_ended_is_asked_of_the_accounting_and_of_one_that_runs_it_is_not(slurm: FakeSlurm) -> None:
    """The queue forgets soon, and never knows the exit code."""
    failed = {**JOB, "state": "FAILED", "exit": "7:0"}
    slurm.set(jobs={"12_0": JOB, "12_1": failed})
    assert Scheduler().jobs(["12_0"])["12_0"].live
    assert slurm.calls("sacct") == []
    assert Scheduler().jobs(["12_1"])["12_1"].exit_code == "7:0"
    assert len(slurm.calls("sacct")) == 1


def test_without_accounting_the_controller_is_asked_and_that_is_said(slurm: FakeSlurm) -> None:
    ended = {**JOB, "state": "NODE_FAIL", "exit": "0:9"}
    slurm.set(jobs={"12_0": ended, "12_1": {**ended, "forgotten": True}}, accounting=False)
    scheduler = Scheduler()
    found = scheduler.jobs(["12_0", "12_1"])
    assert found["12_0"].state == "NODE_FAIL"
    assert "12_1" not in found
    assert "no accounting" in scheduler.warnings[0]


def test_partitions(slurm: FakeSlurm) -> None:
    slurm.set(partitions=["debug*|up|2:00:00|3|gpu:v100:16(S:0-1)|96", "debug*|up|2:00:00|1|(null)|48+"])
    debug = Scheduler().partitions()["debug"]
    assert (debug.default, debug.nodes, debug.gpus, debug.gpu_types) == (True, 4, 16, ("v100",))
    assert (debug.limit_min, debug.cores) == (120, 48)


def test_a_command_that_fails_or_is_missing_says_so(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchedulerError, match=r"scancel: .*Error"):
        Scheduler().cancel(["99"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SchedulerError, match="squeue: not found"):
        Scheduler().jobs(["12"])
