"""What SLURM ends a job for, by what it answers, on a clock of its own."""

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
    """Answers by command, the last of several for ever, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | list[str]):
        self.answers = {
            name: [message] if isinstance(message, str) else message for name, message in answers.items()
        }
        self.asked: list[list[str]] = []
        self.clock = Clock(NOW).rules(monkeypatch, stop)
        monkeypatch.setattr(stop, "_query_slurm", self._reported)

    def _reported(self, command: list[str]) -> str:
        self.asked.append(command)
        message = self.answers.get(command[0], [""])
        return message.pop(0) if len(message) > 1 else message[0]


def at(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds).isoformat()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"JobState=RUNNING StartTime={at(-600)} EndTime={at(60 + TIME_LIMIT_WARNING_S)}", "preempted"),
        (f"JobState=RUNNING StartTime={at(-600)} EndTime={at(59 + TIME_LIMIT_WARNING_S)}", "time limit"),
        (f"JobState=RUNNING StartTime={at(-600)} PreemptTime={at(-601)} EndTime={at(0)}", "time limit"),
        (f"JobState=RUNNING StartTime={at(-600)} PreemptTime={at(-600)} EndTime={at(0)}", "preempted"),
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
def test_what_a_job_is_ended_for(monkeypatch: pytest.MonkeyPatch, message: str, expected: str) -> None:
    slurm = Slurm(monkeypatch, scontrol=message)
    assert stop.stop_reason("12_3", 60.0, 2) == expected
    assert slurm.asked == [["scontrol", "show", "job", "-o", "12_3"]]


RESTARTED = f"JobState=COMPLETING Reason=None Restarts=2 StartTime={at(-60)}"


def test_the_accounting_is_waited_for_until_it_knows_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    first, both = "PREEMPTED\nPENDING\nRUNNING\n", "PREEMPTED\nREQUEUED\n"
    slurm = Slurm(monkeypatch, scontrol=RESTARTED, sacct=[first, first, both], sinfo="n1 mixed\nn2 idle")
    assert stop.stop_reason("7", 60.0, 1) == "preempted, or requeued by hand"
    assert slurm.clock.slept == [ACCOUNTING_DELAY_S / 10] * 2
    assert slurm.asked[1:3] == [
        ["sacct", "-n", "-X", "-P", "-D", "-j", "7", "-o", "State"],
        ["sinfo", "-h", "-N", "-n", "n[1-2]", "-o", "%N %T"],
    ]
    never = Slurm(monkeypatch, scontrol=RESTARTED, sacct=first, sinfo="")
    assert stop.stop_reason("7", 60.0, 1) == "node failure, or requeued by hand"
    assert len(never.clock.slept) in (10, 11)
    silent = Slurm(monkeypatch, scontrol=RESTARTED, sacct="")
    assert stop.stop_reason("7", 60.0, 1) == "node failure, or requeued by hand"
    assert silent.clock.slept == [], "without an accounting there is nothing to wait for"
    nodes = "n3 down*\nn1 failing\nn2 mixed\nn3 down*"
    down = Slurm(monkeypatch, scontrol=RESTARTED, sacct=first, sinfo=nodes)
    assert stop.stop_reason("7", 60.0, 1) == "node failure of n1, n3"
    assert down.clock.slept == []
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    unknown = Slurm(monkeypatch, scontrol=RESTARTED, sacct=both.replace("REQUEUED", "NODE_FAIL"), sinfo=nodes)
    assert stop.stop_reason("7", 60.0, 1) == "node failure"
    assert "sinfo" not in [command[0] for command in unknown.asked]


def test_a_command_that_does_not_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop._query_slurm(["echo", "a", "b"]) == "a b\n"
    assert stop._query_slurm(["false"]) == ""
    assert stop._query_slurm(["/nowhere/at/all"]) == ""
    monkeypatch.setattr(stop, "SLURM_QUERY_TIMEOUT_S", 0.05)
    assert stop._query_slurm(["sleep", "20"]) == ""


def test_what_starts_meanwhile_does_not_hear_slurms_signals() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with stop.signals_blocked():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | set(SIGNALS)
        blocked = next(
            line for line in stop._query_slurm(["cat", "/proc/self/status"]).splitlines() if "SigBlk" in line
        )
        assert all(int(blocked.split()[1], 16) >> number - 1 & 1 for number in SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_reason_of_our_own_is_reported_and_asks_for_another_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm = Slurm(monkeypatch, scontrol="JobState=CANCELLED")
    own = stop.AllocationStop("7")
    assert (own.reason, own.signal, own.requeue, own.terminated) == ("", "", False, False)
    own.give_up("lost node n2")
    own.give_up("lost node n3")
    assert (bool(own), own.reason, own.signal, own.requeue) == (True, "lost node n2", "", True)
    assert slurm.asked == []
    theirs = stop.AllocationStop("7")
    theirs.terminate("n2")
    reason = "stopped by SLURM (SIGTERM): cancelled"
    assert (theirs.reason, theirs.reason, theirs.terminated, theirs.requeue) == (reason, reason, True, False)
    assert len(slurm.asked) == 1, "SLURM is asked once"


def test_a_checkpoint_has_the_time_that_slurm_leaves_it() -> None:
    """Most of the notice before a time limit; after SIGTERM the little that any site gives."""
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
    told = stop.AllocationStop("7")
    told.terminate("n2")
    assert (told.stop_s, told.requeue, told.signal) == (stop.MIN_KILL_WAIT_S, False, "SIGTERM")


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
            "preempted",  # as soon as it had started
        ),
        (
            "JobState=COMPLETING Reason=None PreemptTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:05:00",
            "cancelled",  # the preemption was of an earlier start
        ),
        ("JobState=RUNNING PreemptTime=None EndTime=2020-01-01T10:00:00", "time limit"),
        ("JobState=RUNNING PreemptTime=None EndTime=2120-01-01T10:00:00", "preempted"),
        ("JobState=RUNNING EndTime=Unknown", "preempted or at its time limit"),
        ("", "preempted or at its time limit"),
    ],
)
def test_what_a_signal_means(
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
    assert noticed.reason == f"stopped by SLURM (SIGUSR2): {expected}", "the first reason stays"


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
def test_why_a_job_is_on_its_way_back_into_the_queue(
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
