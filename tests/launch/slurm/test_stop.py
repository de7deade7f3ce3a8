"""Tests of the reason for which SLURM ends a job, from fake answers of SLURM on a simulated clock."""

from __future__ import annotations

import signal
from datetime import datetime

import pytest

from repro.launch.slurm.allocation import stop
from repro.launch.slurm.allocation.stop import ACCOUNTING_DELAY_S, SIGNALS, TIME_LIMIT_WARNING_S
from tests.clock import Clock

NOW = 1_800_000_000.0


class Slurm:
    """SLURM commands with given answers, of which the last repeats, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[str]):
        self.answers = answers
        self.calls: list[list[str]] = []
        self.clock = Clock(NOW).rules(monkeypatch, stop)
        monkeypatch.setattr(stop, "_query_slurm", self._answer)

    def _answer(self, command: list[str]) -> str:
        self.calls.append(command)
        queue = self.answers.get(command[0], [""])
        return queue.pop(0) if len(queue) > 1 else queue[0]


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds).isoformat()


STARTED = f"StartTime={iso(-600)}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"JobState=RUNNING {STARTED} EndTime={iso(60 + TIME_LIMIT_WARNING_S)}", "preempted"),
        (f"JobState=RUNNING {STARTED} EndTime={iso(59 + TIME_LIMIT_WARNING_S)}", "time limit"),
        (f"JobState=RUNNING {STARTED} PreemptTime={iso(-601)} EndTime={iso(0)}", "time limit"),
        (f"JobState=RUNNING {STARTED} PreemptTime={iso(-600)} EndTime={iso(0)}", "preempted"),
        (f"JobState=RUNNING PreemptTime={iso(0)}", "preempted"),
        ("JobState=RUNNING EndTime=Unknown", "preempted, or the job reached its time limit"),
        ("", "preempted, or the job reached its time limit"),
        (f"JobState=CANCELLED PreemptTime=None EndTime={iso(0)}", "cancelled"),
        ("JobState=NODE_FAIL", "node failure"),
        ("JobState=BOOT_FAIL", "node failure"),
        ("JobState=PREEMPTED", "preempted"),
        ("JobState=SUSPENDED", "preempted"),
        ("JobState=TIMEOUT", "time limit"),
        ("JobState=DEADLINE", "time limit"),
        (f"JobState=TIMEOUT {STARTED} PreemptTime={iso(-600)}", "preempted"),
        # The preemption belongs to an earlier start.
        (f"JobState=COMPLETING Reason=None {STARTED} PreemptTime={iso(-601)}", "cancelled"),
        ("JobState=COMPLETING Reason=Preempted Restarts=2", "preempted"),
        ("JobState=COMPLETING Reason=NonZeroExitCode", "cancelled"),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None", "time limit"),
        ("JobState=COMPLETING Reason=NodeDown PreemptTime=None", "node failure"),
    ],
)
def test_stop_reason_of_job_states(monkeypatch: pytest.MonkeyPatch, message: str, expected: str) -> None:
    slurm = Slurm(monkeypatch, scontrol=[message])
    assert stop.stop_reason("12_3", 60.0, 2) == expected
    assert slurm.calls == [["scontrol", "show", "job", "-o", "12_3"]]


RESTARTED = f"JobState=COMPLETING Reason=None Restarts=2 StartTime={iso(-60)}"
FIRST_RUN, UP = "PREEMPTED\nPENDING\nRUNNING\n", "n1 mixed\nn2 idle"
PREEMPTED_OR_REQUEUED = "preempted, or the job was requeued by `scontrol requeue`"
FAILED_OR_REQUEUED = "node failure, or the job was requeued by `scontrol requeue`"


@pytest.mark.parametrize(
    ("sinfo", "sacct", "expected"),
    [
        ("n3 down*\nn1 failing\nn2 mixed\nn3 down*", FIRST_RUN, "node failure of n1, n3"),
        ("n1 mixed\nn2 down*", "PREEMPTED\nNODE_FAIL\n", "node failure of n2"),
        (UP, "PREEMPTED\nNODE_FAIL\n", "node failure"),
        (UP, "PREEMPTED\nREQUEUED\n", PREEMPTED_OR_REQUEUED),
        (UP, "CANCELLED\nPREEMPTED\n", "preempted"),
        (UP, "", FAILED_OR_REQUEUED),  # a site without accounting
    ],
)
def test_requeue_reason_follows_from_nodes_and_accounting(
    monkeypatch: pytest.MonkeyPatch, sinfo: str, sacct: str, expected: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    slurm = Slurm(monkeypatch, scontrol=[RESTARTED], sinfo=[sinfo], sacct=[sacct])
    assert stop.stop_reason("7", 60.0, 1) == expected
    assert slurm.clock.slept == []
    assert slurm.calls[1:] == [
        ["sacct", "-n", "-X", "-P", "-D", "-j", "7", "-o", "State"],
        ["sinfo", "-h", "-N", "-n", "n[1-3]", "-o", "%N %T"],
    ]


def test_requeued_job_waits_for_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    slurm = Slurm(monkeypatch, scontrol=[RESTARTED], sacct=[FIRST_RUN, FIRST_RUN, "PREEMPTED\nREQUEUED\n"])
    assert stop.stop_reason("7", 60.0, 1) == PREEMPTED_OR_REQUEUED
    assert slurm.clock.slept == [ACCOUNTING_DELAY_S / 10] * 2
    assert "sinfo" not in [command[0] for command in slurm.calls], "the nodes of the job are unknown"
    never = Slurm(monkeypatch, scontrol=[RESTARTED], sacct=[FIRST_RUN])
    assert stop.stop_reason("7", 60.0, 1) == FAILED_OR_REQUEUED
    assert len(never.clock.slept) in (10, 11)


def test_failed_query_returns_empty_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop._query_slurm(["echo", "a", "b"]) == "a b\n"
    assert stop._query_slurm(["false"]) == ""
    assert stop._query_slurm(["/nowhere/at/all"]) == ""
    monkeypatch.setattr(stop, "SLURM_QUERY_TIMEOUT_S", 0.05)
    assert stop._query_slurm(["sleep", "20"]) == ""


def test_child_processes_block_signals_of_slurm() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with stop.signals_blocked():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | set(SIGNALS)
    status = stop._query_slurm(["cat", "/proc/self/status"]).splitlines()
    (blocked,) = (int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    assert all(blocked >> number - 1 & 1 for number in SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def fields(stopped: stop.AllocationStop) -> tuple[bool, str, bool, bool, float]:
    return bool(stopped), stopped.signal, stopped.requeue, stopped.terminated, stopped.stop_s


def test_requeue_and_checkpoint_time_follow_from_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has most of the warning time before a limit, but only the minimum kill delay after SIGTERM."""
    slurm = Slurm(monkeypatch, scontrol=["JobState=CANCELLED"])
    warned_s, killed_s = 90 - 2 * stop.MIN_KILL_WAIT_S, stop.MIN_KILL_WAIT_S
    lost = stop.AllocationStop("7")
    assert (fields(lost), lost.reason) == ((False, "", False, False, warned_s), "")
    lost.give_up("lost node n2")
    lost.give_up("lost node n3")
    assert (fields(lost), lost.reason) == ((True, "", True, False, warned_s), "lost node n2")
    assert slurm.calls == []

    ended = stop.AllocationStop("7")
    ended.terminate("n2")
    reason = "stopped by SLURM (SIGTERM): cancelled"
    assert (fields(ended), ended.reason) == ((True, "SIGTERM", False, True, killed_s), reason)
    ended.give_up("a node is lost")
    assert ended.reason == reason, "the first reason counts"
    assert len(slurm.calls) == 1, "SLURM is queried once"

    noticed = stop.AllocationStop("7")
    noticed.note(stop.REQUEUE, None)
    assert fields(noticed) == (True, "SIGUSR2", True, False, warned_s)
    noticed.delay_s = 25.0
    assert noticed.stop_s == killed_s
    noticed.delay_s = 90.0
    noticed.note(signal.SIGTERM, None)
    assert fields(noticed) == (True, "SIGUSR2", True, True, killed_s)
    assert noticed.reason == "stopped by SLURM (SIGUSR2): cancelled"
