"""Tests of the supervision of a launch: the reported reason is the first cause, also for real ranks that fail."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from repro.config import Experiment, Layout, Training
from repro.launch import supervise
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank_process import Position
from repro.launch.supervise import Ending, watch
from tests.clock import Clock
from tests.launch.runs import FAKE
from tests.launch.scripted import MODEL, Reports, Scripted, experiment


class FaultClock(Clock):
    """A clock that advances only while all ranks are in the state in which a limit should end them.

    The ranks are real processes of unknown speed, so each sleep also lasts in real time.
    """

    def __init__(self, launched: LocalLaunch):
        super().__init__()
        self.launched = launched

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._is_fault_reached():
            super().sleep(seconds)

    def _is_fault_reached(self) -> bool:
        """Return whether a rank is stopped and the others wait, or whether all ranks wait in the second step."""
        positions = [self.launched.position(rank) for rank in range(self.launched.world)]
        if len({position.sequence for position in positions}) > 1:
            return False
        stopped = any(self.launched.stopped(rank) for rank in range(self.launched.world))
        return stopped or ("FAKE_HOLD" in os.environ and all(position.step == 1 for position in positions))


def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **limits: Any
) -> tuple[Ending, LocalLaunch]:
    monkeypatch.setenv("FAKE_FAULT", fault)
    job = Job(experiments=[experiment("a", **limits), experiment("b", **limits)])
    launched = LocalLaunch(job, tmp_path / "logs", target=FAKE)
    if limits.keys() & {"hang_s", "timeout_s"}:
        FaultClock(launched).rules(monkeypatch, supervise)
    launched.start()
    ending = watch(launched)
    assert all(launched.poll(rank) is not None for rank in range(2)), "a rank was not reaped"
    return ending, launched


AT = "at step {}, backward, after all_reduce #{} on dp"
CASES = {
    "kill:b:1:3": ("error", f"rank 1 was killed by signal 9 (SIGKILL) {AT.format(3, 10)}"),
    "nan:b:0:2": ("diverged", f"rank 0 {AT.format(2, 9)}: Diverged: loss is nan"),
    "abort:b:0:1": ("oom", f"rank 0 was killed by signal 6 (SIGABRT) {AT.format(1, 8)}: std::bad_alloc"),
    "memory:b:1:3": ("oom", f"rank 1 {AT.format(3, 10)}: MemoryError"),
    # NCCL's watchdog aborts a rank whose peer failed, here before the peer reports the cause.
    "watchdog:b:1:2,raise-late:b:0:2": ("error", f"rank 0 {AT.format(2, 9)}: KeyError: 'no such thing'"),
}


@pytest.mark.parametrize("fault", CASES)
def test_reason_names_the_first_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    limits = {"memory_bytes": 50_000_000} if fault.startswith("memory") else {}
    ending, launched = launch(tmp_path, monkeypatch, fault, **limits)
    assert (ending.outcome, ending.reason, ending.experiment) == (*CASES[fault], 1)
    assert launched.results(0) is not None, "the results of the finished experiment are lost"
    assert launched.results(1) is None
    launched.close(keep_logs=tmp_path / "kept")
    assert (tmp_path / "kept" / "rank-0.err").exists()
    assert not launched.folder.exists()
    assert not launched.logs.exists()


def test_hang_logs_the_stacks_of_waiting_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, launched = launch(tmp_path, monkeypatch, "stop:b:0:1", hang_s=0.5)
    assert (ending.outcome, ending.experiment) == ("hang", 1)
    assert ending.reason.startswith("no progress for 0.5 s (limits.hang_s): rank 0 is stopped")
    assert f"rank 1 waits {AT.format(1, 8)}" in ending.reason
    assert "most recent call first" in launched.error_text(1)
    launched.close(keep_logs=None)
    assert not (tmp_path / "logs").exists()


def test_timeout_ends_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setenv("FAKE_HOLD", str(tmp_path))
    ending, launched = launch(tmp_path, monkeypatch, "", timeout_s=0.5)
    launched.close(keep_logs=None)
    assert (ending.outcome, ending.experiment) == ("timeout", 0)
    assert "not done after 0.5 s (limits.timeout_s) (ranks 0, 1 at step 1, forward" in ending.reason


ECHO = ("error", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize(
    ("codes", "reports", "outcome", "rank"),
    [
        ([1, 3, 1], {0: ECHO, 1: ("oom", "MemoryError"), 2: ECHO}, "oom", 1),
        ([1, 1, -9], {0: ECHO, 1: ECHO}, "error", 2),
        ([1, 1, 1], {0: ECHO, 1: ("error", "ValueError: no"), 2: ECHO}, "error", 1),
        ([-9, 3, 1], {1: ("oom", "MemoryError"), 2: ECHO}, "oom", 1),
        ([1, 4, 4], {0: ECHO, 1: ("diverged", "nan"), 2: ("diverged", "nan")}, "diverged", 1),
    ],
)
def test_cause_takes_precedence_over_errors_of_peers(
    codes: list[int | None], reports: Reports, outcome: str, rank: int
) -> None:
    scripted = Scripted(codes, reports)
    ending = watch(scripted)
    assert ending.outcome == outcome
    assert ending.reason.startswith(f"rank {rank} ")
    assert scripted.killed


PIPELINE = Experiment(
    name="p", model=MODEL, layout=Layout(tp=2, pp=2, global_batch=4), training=Training(steps=6)
)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # (step, phase, sequence) of ranks 0, 1 (stage 0) and 2, 3 (stage 1), which issue more collectives.
        ([(5, "idle", 40), (5, "idle", 40), (5, "forward", 90), (5, "forward", 91)], [2]),
        ([(5, "forward", 40), (5, "forward", 40), (5, "forward", 90), (5, "forward", 91)], [2]),
        ([(5, "idle", 40), (5, "idle", 40), (5, "backward", 91), (5, "backward", 91)], [2, 3]),
        ([(5, "forward", 40), (5, "forward", 40), (4, "optimizer", 91), (4, "idle", 91)], [2]),
        ([(5, "forward", 41), (5, "forward", 40), (5, "idle", 91), (5, "idle", 91)], [1]),
        ([(5, "idle", 40), (5, "idle", 40), (5, "idle", 91), (5, "idle", 91)], [0, 1, 2, 3]),
    ],
)
def test_lagging_ranks_ignore_collective_counts_of_other_stages(
    states: list[tuple[int, str, int]], expected: list[int]
) -> None:
    positions = [Position(0, step, phase, sequence, "send", "pp", 1.0) for step, phase, sequence in states]
    assert supervise.lagging_ranks(positions, Job(experiments=[PIPELINE])) == expected
