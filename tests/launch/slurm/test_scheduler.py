"""Tests of the output of SLURM commands as data, and of the number of calls."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from repro.config import ConfigError
from repro.launch.slurm import scheduler
from repro.launch.slurm.scheduler import (
    UNLIMITED,
    JobState,
    Scheduler,
    SchedulerError,
    check_partition,
    expand,
)


def test_array_ids_are_expanded_to_elements() -> None:
    assert expand("12_[0-2,5%4]") == ["12_0", "12_1", "12_2", "12_5"]
    assert [expand(text) for text in ("12", "12_3", "12_[7]")] == [["12"], ["12_3"], ["12_7"]]
    assert expand("12.batch") == ["12.batch"]


class FakeCommands:
    """SLURM commands with fixed answers, which store their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | None):
        self.answers = answers
        self.calls: list[list[str]] = []
        monkeypatch.setattr(scheduler, "run_slurm_command", self._call)
        monkeypatch.setattr("getpass.getuser", lambda: "me")

    def _call(self, command: list[str], timeout_s: float = 0.0) -> str:
        self.calls.append(command)
        answer = self.answers[command[0]]
        if answer is None:
            raise SchedulerError(f"{command[0]}: disabled")
        return answer


SQUEUE = ["squeue", "-h", "-r", "-t", "all", "-u", "me", "-o", "%i|%T|%r|%N"]


def test_job_states_are_read_from_queue_and_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue lists ended jobs for a short time only, and without their exit codes."""
    queue = "12_0|PENDING|Resources|\n12_1|RUNNING|None|n[1-2]\nan|odd|line\n12_5|FAILED|None|n1\n99|RUNNING|None|n9\n"
    sacct = "12_[2-3]|CANCELLED by 1000|None|None assigned|0:15\n12_4||Unknown|n3|1:0\nodd|line\n98|FAILED|x|n|1:0\n"
    commands = FakeCommands(monkeypatch, squeue=queue, sacct=sacct + "12_5|FAILED|None|n1|7:0\n")
    cancelled = JobState(state="CANCELLED", exit_code="0:15")
    found = Scheduler().jobs([f"12_{index}" for index in range(7)])
    assert found == {
        "12_0": JobState(state="PENDING", reason="Resources"),
        "12_1": JobState(state="RUNNING", nodes="n[1-2]"),
        "12_2": cancelled,
        "12_3": cancelled,
        "12_4": JobState(state="UNKNOWN", nodes="n3", exit_code="1:0"),
        "12_5": JobState(state="FAILED", nodes="n1", exit_code="7:0"),
    }
    assert [(found[f"12_{i}"].live, found[f"12_{i}"].waiting) for i in range(3)] == [
        *((True, True), (True, False), (False, False))
    ]
    sacct_command = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,NodeList,ExitCode", "-j", "12"]
    assert commands.calls == [SQUEUE, sacct_command]
    assert len(Scheduler().jobs(["12_0", "12_1"])) == 2
    assert commands.calls[2:] == [SQUEUE], "only ended jobs are queried in the accounting"


def test_job_ids_are_divided_into_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 job ids are divided into three calls with at most 200 ids each."""
    ids = [str(number) for number in range(100, 600)]
    sacct = "\n".join(f"{one}|COMPLETED|None|n1|0:0" for one in ids)
    commands = FakeCommands(monkeypatch, squeue="", sacct=sacct, scancel="")
    assert len(Scheduler().jobs(ids)) == 500
    batches = [call[-1].split(",") for call in commands.calls[1:]]
    assert [len(each) for each in batches] == [200, 200, 100]
    assert sorted(one for each in batches for one in each) == ids
    commands.calls.clear()
    Scheduler().cancel(ids[:201])
    assert commands.calls == [["scancel", *ids[:200]], ["scancel", ids[200]]]
    assert Scheduler().jobs([]) == {}


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
    """An empty partition name in a profile means the default partition, which has a star."""
    lines = [
        "a*|up|2:00:00|3|gpu:v100:8(S:0-1),gpu:k80:2,gpu:v100:2,nic:4|96",
        "a*|up|2:00:00|1|gpu:v100:4|48+",
        "b|down|infinite|2|gpu:2|16",
        "c|up|1:00|1|(null)|8",
    ]
    commands = FakeCommands(monkeypatch, sinfo="\n".join(lines))
    found = Scheduler().partitions()
    # Name, default, available, time limit in minutes, nodes, GPUs, types of GPUs, cores.
    assert [astuple(partition) for partition in found.values()] == [
        ("a", True, True, 120.0, 4, 12, ("k80", "v100"), 48),
        ("b", False, False, UNLIMITED, 2, 2, (), 16),
        ("c", False, True, 1.0, 1, 0, (), 8),
    ]
    assert commands.calls == [["sinfo", "-h", "-o", "%P|%a|%l|%D|%G|%c"]]
    assert check_partition(found, "", file="f", where="slurm") == found["a"]
    assert check_partition(found, "b", file="f", where="slurm") == found["b"]
    del found["a"]
    error = r"slurm.partition: the key is empty, and the cluster has no default partition; its partitions are b, c"
    with pytest.raises(ConfigError, match=error):
        check_partition(found, "", file="f", where="slurm")


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
    with pytest.raises(SchedulerError, match="no-such-command: not found: run repro on a login node"):
        scheduler.run_slurm_command(["no-such-command"])
