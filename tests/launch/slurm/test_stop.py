"""Tests of the reason for which SLURM ends a job, from fake answers of SLURM on a simulated clock."""

from __future__ import annotations

import signal
from datetime import datetime
from pathlib import Path

import pytest

from repro.launch.slurm.allocation import stop
from repro.launch.slurm.allocation.stop import ACCOUNTING_DELAY_S, SIGNALS, TIME_LIMIT_WARNING_S
from tests.clock import Clock

NOW = 1_800_000_000.0


class Slurm:
    """SLURM commands with given answers, of which the last repeats, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | list[str]):
        self.answers = {
            name: [answer] if isinstance(answer, str) else answer for name, answer in answers.items()
        }
        self.calls: list[list[str]] = []
        self.clock = Clock(NOW).rules(monkeypatch, stop)
        monkeypatch.setattr(stop, "_query_slurm", self._answer)

    def _answer(self, command: list[str]) -> str:
        self.calls.append(command)
        queue = self.answers.get(command[0], [""])
        return queue.pop(0) if len(queue) > 1 else queue[0]


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds).isoformat()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"JobState=RUNNING StartTime={iso(-600)} EndTime={iso(60 + TIME_LIMIT_WARNING_S)}", "preempted"),
        (f"JobState=RUNNING StartTime={iso(-600)} EndTime={iso(59 + TIME_LIMIT_WARNING_S)}", "time limit"),
        (f"JobState=RUNNING StartTime={iso(-600)} PreemptTime={iso(-601)} EndTime={iso(0)}", "time limit"),
        (f"JobState=RUNNING StartTime={iso(-600)} PreemptTime={iso(-600)} EndTime={iso(0)}", "preempted"),
        ("JobState=CANCELLED", "cancelled"),
        ("JobState=BOOT_FAIL", "node failure"),
        ("JobState=PREEMPTED", "preempted"),
        ("JobState=SUSPENDED", "preempted"),
        ("JobState=TIMEOUT", "time limit"),
        ("JobState=DEADLINE", "time limit"),
        ("JobState=COMPLETING Reason=Preempted Restarts=2", "preempted"),
        ("JobState=COMPLETING Reason=NonZeroExitCode", "cancelled"),
    ],
)
def test_stop_reason_of_job_states(monkeypatch: pytest.MonkeyPatch, message: str, expected: str) -> None:
    slurm = Slurm(monkeypatch, scontrol=message)
    assert stop.stop_reason("12_3", 60.0, 2) == expected
    assert slurm.calls == [["scontrol", "show", "job", "-o", "12_3"]]


RESTARTED = f"JobState=COMPLETING Reason=None Restarts=2 StartTime={iso(-60)}"


def test_requeued_job_waits_for_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    first, both = "PREEMPTED\nPENDING\nRUNNING\n", "PREEMPTED\nREQUEUED\n"
    slurm = Slurm(monkeypatch, scontrol=RESTARTED, sacct=[first, first, both], sinfo="n1 mixed\nn2 idle")
    assert stop.stop_reason("7", 60.0, 1) == "preempted, or requeued by hand"
    assert slurm.clock.slept == [ACCOUNTING_DELAY_S / 10] * 2
    assert slurm.calls[1:3] == [
        ["sacct", "-n", "-X", "-P", "-D", "-j", "7", "-o", "State"],
        ["sinfo", "-h", "-N", "-n", "n[1-2]", "-o", "%N %T"],
    ]
    never = Slurm(monkeypatch, scontrol=RESTARTED, sacct=first, sinfo="")
    assert stop.stop_reason("7", 60.0, 1) == "node failure, or requeued by hand"
    assert len(never.clock.slept) in (10, 11)
    silent = Slurm(monkeypatch, scontrol=RESTARTED, sacct="")
    assert stop.stop_reason("7", 60.0, 1) == "node failure, or requeued by hand"
    assert silent.clock.slept == [], "without accounting, the query does not wait"
    nodes = "n3 down*\nn1 failing\nn2 mixed\nn3 down*"
    down = Slurm(monkeypatch, scontrol=RESTARTED, sacct=first, sinfo=nodes)
    assert stop.stop_reason("7", 60.0, 1) == "node failure of n1, n3"
    assert down.clock.slept == []
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    unknown = Slurm(monkeypatch, scontrol=RESTARTED, sacct=both.replace("REQUEUED", "NODE_FAIL"), sinfo=nodes)
    assert stop.stop_reason("7", 60.0, 1) == "node failure"
    assert "sinfo" not in [command[0] for command in unknown.calls]


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
        blocked = next(
            line for line in stop._query_slurm(["cat", "/proc/self/status"]).splitlines() if "SigBlk" in line
        )
        assert all(int(blocked.split()[1], 16) >> number - 1 & 1 for number in SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_give_up_requests_a_requeue_and_sigterm_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm = Slurm(monkeypatch, scontrol="JobState=CANCELLED")
    lost = stop.AllocationStop("7")
    assert (lost.reason, lost.signal, lost.requeue, lost.terminated) == ("", "", False, False)
    lost.give_up("lost node n2")
    lost.give_up("lost node n3")
    assert (bool(lost), lost.reason, lost.signal, lost.requeue) == (True, "lost node n2", "", True)
    assert slurm.calls == []
    ended = stop.AllocationStop("7")
    ended.terminate("n2")
    reason = "stopped by SLURM (SIGTERM): cancelled"
    assert (ended.reason, ended.reason, ended.terminated, ended.requeue) == (reason, reason, True, False)
    assert len(slurm.calls) == 1, "SLURM is queried once"


def test_checkpoint_time_depends_on_the_received_signal() -> None:
    """A checkpoint has most of the warning time before a limit, but only the minimum kill delay after SIGTERM."""
    noticed = stop.AllocationStop("7")
    assert not noticed
    noticed.note(stop.REQUEUE, None)
    assert (bool(noticed), noticed.requeue, noticed.terminated) == (True, True, False)
    assert noticed.stop_s == 90 - 2 * stop.MIN_KILL_WAIT_S
    noticed.delay_s = 25.0
    assert noticed.stop_s == stop.MIN_KILL_WAIT_S
    noticed.delay_s = 90.0
    noticed.note(signal.SIGTERM, None)
    assert (noticed.terminated, noticed.signal) == (True, "SIGUSR2")
    assert noticed.stop_s == stop.MIN_KILL_WAIT_S
    ended = stop.AllocationStop("7")
    ended.terminate("n2")
    assert (ended.stop_s, ended.requeue, ended.signal) == (stop.MIN_KILL_WAIT_S, False, "SIGTERM")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("JobState=CANCELLED PreemptTime=None EndTime=2026-11-21T10:00:00", "cancelled"),
        ("JobState=COMPLETING Reason=None PreemptTime=None EndTime=2026-11-21T10:00:00", "cancelled"),
        (
            "JobState=COMPLETING Reason=None Restarts=1 StartTime=2026-11-21T10:00:00 EndTime=Unknown",
            "node failure, or requeued by hand",
        ),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None EndTime=2026-11-21T10:00:00", "time limit"),
        ("JobState=COMPLETING Reason=NodeDown PreemptTime=None EndTime=2026-11-21T10:00:00", "node failure"),
        ("JobState=NODE_FAIL", "node failure"),
        ("JobState=RUNNING PreemptTime=2026-11-21T10:00:00", "preempted"),
        (
            "JobState=TIMEOUT PreemptTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:00:00",
            "preempted",  # immediately after its start
        ),
        (
            "JobState=COMPLETING Reason=None PreemptTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:05:00",
            "cancelled",  # the preemption belongs to an earlier start
        ),
        ("JobState=RUNNING PreemptTime=None EndTime=2020-01-01T10:00:00", "time limit"),
        ("JobState=RUNNING PreemptTime=None EndTime=2120-01-01T10:00:00", "preempted"),
        ("JobState=RUNNING EndTime=Unknown", "preempted or at its time limit"),
        ("", "preempted or at its time limit"),
    ],
)
def test_reason_of_a_signal_follows_from_scontrol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: str
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert stop.stop_reason("7", 90) == expected
    noticed = stop.AllocationStop("7")
    assert noticed.reason == ""
    noticed.note(stop.REQUEUE, None)
    assert noticed.reason == f"stopped by SLURM (SIGUSR2): {expected}"
    noticed.give_up("a node is lost")
    assert noticed.reason == f"stopped by SLURM (SIGUSR2): {expected}", "the first reason counts"


@pytest.mark.parametrize(
    ("state", "accounted", "expected"),
    [
        ("down*", "NODE_FAIL", "node failure of n2"),
        ("down*", "RUNNING", "node failure of n2"),
        ("mixed", "NODE_FAIL", "node failure"),
        ("mixed", "REQUEUED", "preempted, or requeued by hand"),
        ("mixed", "PREEMPTED", "preempted"),
        ("mixed", "RUNNING", "node failure, or requeued by hand"),
    ],
)
def test_requeue_reason_follows_from_nodes_and_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, accounted: str, expected: str
) -> None:
    answers = {
        "scontrol": "JobState=COMPLETING Reason=None Restarts=3",
        "sinfo": f"n1 mixed\nn2 {state}",
        "sacct": f"PREEMPTED\nPREEMPTED\n{accounted}",
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    Clock().rules(monkeypatch, stop)
    assert stop.stop_reason("7", 90, restarts=2) == expected
    assert stop.stop_reason("7", 90, restarts=3) == "cancelled"
