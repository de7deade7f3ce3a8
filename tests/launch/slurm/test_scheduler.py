"""Tests of the output of SLURM commands as data, and of the number of calls."""

from __future__ import annotations

import pytest

from repro.config import ConfigError
from repro.launch.slurm import scheduler
from repro.launch.slurm.scheduler import (
    UNLIMITED,
    JobState,
    Partition,
    Scheduler,
    SchedulerError,
    _gpus,
    check_partition,
    expand,
)
from tests.launch.slurm.conftest import FakeSlurm

JOB = {"state": "RUNNING", "reason": "None", "nodes": "n[1-2]", "exit": "0:0"}


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[0-2,5%4]", ["12_0", "12_1", "12_2", "12_5"]),
        ("12_[7]", ["12_7"]),
        ("12.batch", ["12.batch"]),
    ],
)
def test_array_ids_are_expanded_to_elements(text: str, elements: list[str]) -> None:
    assert expand(text) == elements


def test_hundreds_of_jobs_take_two_calls(slurm: FakeSlurm) -> None:
    jobs = {f"12_{i}": JOB for i in range(250)} | {
        f"13_{i}": {**JOB, "state": "COMPLETED", "forgotten": True} for i in range(250)
    }
    slurm.set(jobs=jobs)
    found = Scheduler().jobs(jobs)
    assert {key: job.state for key, job in found.items()} == {key: job["state"] for key, job in jobs.items()}
    assert found["12_0"].nodes == "n[1-2]"
    assert len(slurm.calls("squeue")) == len(slurm.calls("sacct")) == 1


def test_only_ended_jobs_are_queried_in_the_accounting(slurm: FakeSlurm) -> None:
    """squeue lists ended jobs for a short time only, and without their exit codes."""
    failed = {**JOB, "state": "FAILED", "exit": "7:0"}
    slurm.set(jobs={"12_0": JOB, "12_1": failed})
    assert Scheduler().jobs(["12_0"])["12_0"].live
    assert slurm.calls("sacct") == []
    assert Scheduler().jobs(["12_1"])["12_1"].exit_code == "7:0"
    assert len(slurm.calls("sacct")) == 1


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:v100:8(S:0-1),nic:2", {"v100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4,gpu:a100:2,gpu:t4:1", {"a100": 6, "t4": 1}),
        ("(null)", {}),
    ],
)
def test_gpus_of_a_node_by_type(text: str, gpus: dict[str, int]) -> None:
    assert _gpus(text) == gpus


def test_empty_partition_name_means_the_default_partition(slurm: FakeSlurm) -> None:
    partitions = Scheduler().partitions()
    assert check_partition(partitions, "", file="f", where="slurm").name == "debug"
    assert check_partition(partitions, "old", file="f", where="slurm").gpus == 4
    del partitions["debug"]
    with pytest.raises(
        ConfigError,
        match=r"slurm.partition: is empty, and the cluster has no default partition; known are old, short",
    ):
        check_partition(partitions, "", file="f", where="slurm")


def test_job_ids_are_divided_into_several_calls(slurm: FakeSlurm) -> None:
    """500 job ids are divided into three calls with at most 200 ids each."""
    ids = [str(number) for number in range(100, 600)]
    slurm.set(jobs={one: {**JOB, "state": "COMPLETED", "forgotten": True} for one in ids})
    assert len(Scheduler().jobs(ids)) == 500
    batches = [arguments[arguments.index("-j") + 1].split(",") for arguments in slurm.calls("sacct")]
    assert [len(each) for each in batches] == [200, 200, 100]
    assert sorted(one for each in batches for one in each) == ids
    Scheduler().cancel(ids[:201])
    assert [len(each) for each in slurm.calls("scancel")] == [200, 1]
    assert Scheduler().jobs([]) == {}


def test_failed_or_missing_command_raises_scheduler_error(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchedulerError, match=r"scancel: .*Error"):
        Scheduler().cancel(["99"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SchedulerError, match="squeue: not found"):
        Scheduler().jobs(["12"])


class FakeCommands:
    """SLURM commands with fixed answers, which store their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | None):
        self.answers = answers
        self.calls: list[list[str]] = []
        monkeypatch.setattr(scheduler, "run_slurm_command", self._call)

    def _call(self, command: list[str], timeout_s: float = 0.0) -> str:
        self.calls.append(command)
        answer = self.answers[command[0]]
        if answer is None:
            raise SchedulerError(f"{command[0]}: disabled")
        return answer


def test_job_states_are_read_from_queue_and_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    queue = "12_0|PENDING|Resources|\n12_1|RUNNING|None|n[1-2]\nan|odd|line\n99|RUNNING|None|n9\n"
    sacct = "12_[2-3]|CANCELLED by 1000|None|None assigned|0:15\n12_4||Unknown|n3|1:0\nodd|line\n98|FAILED|x|n|1:0\n"
    commands = FakeCommands(monkeypatch, squeue=queue, sacct=sacct)
    cancelled = JobState(state="CANCELLED", exit_code="0:15")
    found = Scheduler().jobs([f"12_{index}" for index in range(6)])
    assert found == {
        "12_0": JobState(state="PENDING", reason="Resources"),
        "12_1": JobState(state="RUNNING", nodes="n[1-2]"),
        "12_2": cancelled,
        "12_3": cancelled,
        "12_4": JobState(state="UNKNOWN", nodes="n3", exit_code="1:0"),
    }
    assert [(found[f"12_{i}"].live, found[f"12_{i}"].waiting) for i in range(3)] == [
        *((True, True), (True, False), (False, False))
    ]
    assert commands.calls == [
        ["squeue", "-h", "-r", "-t", "all", "-u", "me", "-o", "%i|%T|%r|%N"],
        ["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,NodeList,ExitCode", "-j", "12"],
    ]


def test_scontrol_replaces_a_missing_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = (
        "No jobs here\n"
        "JobId=13 ArrayJobId=12 ArrayTaskId=1 JobState=FAILED Reason=NonZeroExitCode NodeList=n1 ExitCode=1:0"
        " Restarts=3\n"
        "JobId=14 ArrayJobId=12 ArrayTaskId=2-3 Reason=None NodeList=(null)\n"
        "JobId=15 JobState=TIMEOUT Reason=TimeLimit NodeList=n2 ExitCode=0:0\nJobId=16 JobState=FAILED\n"
    )
    commands = FakeCommands(monkeypatch, squeue="", sacct=None, scontrol=scontrol)
    cluster = Scheduler()
    assert cluster.jobs(["12_1", "12_2", "15", "17"]) == {
        "12_1": JobState(state="FAILED", reason="NonZeroExitCode", nodes="n1", exit_code="1:0", restarts=3),
        "12_2": JobState(state="UNKNOWN"),
        "15": JobState(state="TIMEOUT", reason="TimeLimit", nodes="n2", exit_code="0:0"),
    }
    assert commands.calls[-1] == ["scontrol", "show", "job", "-o"]
    assert cluster.warnings == [
        "no accounting on this cluster (sacct: disabled): SLURM reports the end of a job for a few minutes only;"
        " later only the job's files show its end"
    ]


def test_partitions_are_merged_from_sinfo_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "a*|up|2:00:00|3|gpu:v100:8,gpu:k80:2|96",
        "a*|up|2:00:00|1|gpu:v100:4|48+",
        "b|down|infinite|2|gpu:2|16",
    ]
    commands = FakeCommands(monkeypatch, sinfo="\n".join(lines))
    fields = {"name": "a", "default": True, "available": True, "limit_min": 120.0, "nodes": 4, "cores": 48}
    assert Scheduler().partitions() == {
        "a": Partition(**fields, gpus=10, gpu_types=("k80", "v100")),
        "b": Partition(
            name="b",
            default=False,
            available=False,
            limit_min=UNLIMITED,
            nodes=2,
            cores=16,
            gpus=2,
            gpu_types=(),
        ),
    }
    assert commands.calls == [["sinfo", "-h", "-o", "%P|%a|%l|%D|%G|%c"]]


def test_failed_command_names_error_or_exit_code() -> None:
    assert scheduler.run_slurm_command(["sh", "-c", "echo a; echo b >&2"]) == "a\n"
    for script, message in (
        ("exit 3", "sh: exit code 3"),
        ("echo 'no   such\njob' >&2; echo out; exit 1", "sh: no such job"),
        ("echo out; exit 1", "sh: out"),
        (f"printf '{'x' * 301}'; exit 1", "sh: " + "x" * 300),
    ):
        with pytest.raises(SchedulerError) as failed:
            scheduler.run_slurm_command(["sh", "-c", script])
        assert str(failed.value) == message
    with pytest.raises(SchedulerError, match=r"sleep: no answer in 0.05 s: is slurmctld up\?"):
        scheduler.run_slurm_command(["sleep", "20"], timeout_s=0.05)
