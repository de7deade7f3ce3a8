"""What SLURM's commands print, as data; few calls, however many jobs."""

from __future__ import annotations

import pytest

from repro.config import ConfigError
from repro.launch.slurm.site.scheduler import Scheduler, SchedulerError, _gpus, check_partition, expand
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


@pytest.mark.parametrize(
    ("written", "gpus"),
    [
        ("gpu:v100:8(S:0-1),nic:2", {"v100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4,gpu:a100:2,gpu:t4:1", {"a100": 6, "t4": 1}),
        ("(null)", {}),
    ],
)
def test_gpus_of_a_node_by_type(written: str, gpus: dict[str, int]) -> None:
    assert _gpus(written) == gpus


def test_without_a_name_the_default_partition_is_meant(slurm: FakeSlurm) -> None:
    partitions = Scheduler().partitions()
    assert check_partition(partitions, "", file="f", where="slurm").name == "debug"
    assert check_partition(partitions, "old", file="f", where="slurm").gpus == 4
    del partitions["debug"]
    with pytest.raises(
        ConfigError, match=r"slurm.partition: is empty, and the cluster has no default; known are old, short"
    ):
        check_partition(partitions, "", file="f", where="slurm")


def test_a_command_line_has_an_end(slurm: FakeSlurm) -> None:
    """Five hundred jobs of their own are three calls of two hundred at most."""
    ids = [str(number) for number in range(100, 600)]
    slurm.set(jobs={one: {**JOB, "state": "COMPLETED", "forgotten": True} for one in ids})
    assert len(Scheduler().jobs(ids)) == 500
    asked = [arguments[arguments.index("-j") + 1].split(",") for arguments in slurm.calls("sacct")]
    assert [len(each) for each in asked] == [200, 200, 100]
    assert sorted(one for each in asked for one in each) == ids
    Scheduler().cancel(ids[:201])
    assert [len(each) for each in slurm.calls("scancel")] == [200, 1]
    assert Scheduler().jobs([]) == {}


def test_a_command_that_fails_or_is_missing_says_so(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchedulerError, match=r"scancel: .*Error"):
        Scheduler().cancel(["99"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SchedulerError, match="squeue: not found"):
        Scheduler().jobs(["12"])
