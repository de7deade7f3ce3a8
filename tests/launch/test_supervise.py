"""Tests of the supervision of a launch: the reported reason is the first cause, also for real ranks that fail."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.config import Experiment, Layout, Training
from repro.launch import supervise
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch, rank_environment
from repro.launch.rank import program as rank_program
from repro.launch.rank_process import Position
from repro.launch.supervise import Ending, signal_name, watch
from tests.clock import Clock
from tests.launch import fake_session
from tests.launch.runs import FAKE
from tests.launch.scripted import MODEL, Scripted, experiment


def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **limits: Any
) -> tuple[Ending, LocalLaunch]:
    monkeypatch.setenv("FAKE_FAULT", fault)
    if fault.startswith("stop"):
        limits["hang_s"] = 2.0
    job = Job(experiments=[experiment("a", **limits), experiment("b", **limits)])
    launched = LocalLaunch(job, tmp_path / "logs", target=FAKE)
    if limits.keys() & {"hang_s", "timeout_s"}:
        FaultClock(launched).rules(monkeypatch, supervise)
    launched.start()
    ending = watch(launched)
    assert all(launched.poll(rank) is not None for rank in range(2)), "a rank was not reaped"
    return ending, launched


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


CASES = {
    "kill:b:1:3": (
        "error",
        "rank 1 was killed by signal 9 (SIGKILL) at step 3, backward, after all_reduce #10 on dp",
    ),
    "stop:b:1:3": ("hang", "no progress for 2 s (limits.hang_s): rank 1 is stopped"),
    "nan:b:0:2": ("diverged", "rank 0 at step 2, backward, after all_reduce #9 on dp: Diverged: loss is nan"),
    "raise:b:1:2": (
        "error",
        "rank 1 at step 2, backward, after all_reduce #9 on dp: KeyError: 'no such thing'",
    ),
    "exit:b:0:1": ("error", "rank 0 ended with exit code 7 at step 1"),
    "abort:b:0:1": ("oom", "rank 0 was killed by signal 6 (SIGABRT) at step 1"),
    "abort-in-torch:b:0:1": ("oom", "rank 0 was killed by signal 6 (SIGABRT) at step 1"),
    "abort-otherwise:b:0:1": ("error", "rank 0 was killed by signal 6 (SIGABRT) at step 1"),
    # NCCL's watchdog aborts a rank whose peer failed, here before the peer reports the cause.
    "watchdog:b:1:2,raise-late:b:0:2": (
        "error",
        "rank 0 at step 2, backward, after all_reduce #9 on dp: KeyError: 'no such thing'",
    ),
    "watchdog:b:1:2,watchdog-device:b:0:2": (
        "error",
        "rank 0 was killed by signal 6 (SIGABRT) at step 2, backward, after all_reduce #9 on dp: CUDA error: an",
    ),
    # Libraries such as oneDNN access memory after a failed allocation.
    "memory-unchecked:b:0:1": (
        "oom",
        "rank 0 was killed by signal 11 (SIGSEGV) at step 1, backward, after all_reduce #8 on dp: probably a library "
        "used memory that the limit of 50 MB refused",
    ),
    "memory:b:1:3": ("oom", "rank 1 at step 3, backward, after all_reduce #10 on dp: MemoryError"),
}


@pytest.mark.parametrize("fault", CASES)
def test_reason_names_the_first_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    limits = {"memory_bytes": 50_000_000} if fault.startswith("memory") else {}
    ending, launched = launch(tmp_path, monkeypatch, fault, **limits)
    outcome, reason = CASES[fault]
    assert (ending.outcome, ending.experiment) == (outcome, 1)
    assert ending.reason.startswith(reason)
    assert launched.results(0) is not None, "the results of the finished experiment are lost"
    assert launched.results(1) is None
    launched.close(keep_logs=tmp_path / "kept")
    assert (tmp_path / "kept" / "rank-0.err").exists()
    assert not launched.folder.exists()
    assert not launched.logs.exists()


def test_hang_logs_the_stacks_of_waiting_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, launched = launch(tmp_path, monkeypatch, "stop:a:0:1")
    assert "rank 1 waits at step 1, backward, after all_reduce #2 on dp" in ending.reason
    assert "most recent call first" in launched.error_text(1)
    launched.close(keep_logs=None)
    assert not (tmp_path / "logs").exists()


def test_timeout_ends_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setenv("FAKE_HOLD", str(tmp_path))
    ending, launched = launch(tmp_path, monkeypatch, "", timeout_s=2)
    launched.close(keep_logs=None)
    assert (ending.outcome, ending.experiment) == ("timeout", 0)
    assert "not done after 2 s (limits.timeout_s) (ranks 0, 1 at step 1, forward" in ending.reason


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
    codes: list[int | None], reports: dict[int, tuple[str, str]], outcome: str, rank: int
) -> None:
    scripted = Scripted(codes, reports)
    ending = watch(scripted)
    assert ending.outcome == outcome
    assert ending.reason.startswith(f"rank {rank} ")
    assert scripted.killed


def test_watchdog_error_is_reported_without_a_cause() -> None:
    ending = watch(Scripted([-6, -6], {}, "terminate called: " + fake_session.ABORTS["watchdog"].decode()))
    assert ending.outcome == "error"
    assert (
        "(SIGABRT) at step 5, forward, after all_gather #40 on tp: NCCL's watchdog: NCCL error"
        in ending.reason
    )


@pytest.mark.parametrize(
    ("reports", "settled_s"),
    [
        ({0: ECHO, 1: ECHO}, supervise.ECHO_GRACE_S),  # the third rank may report the cause
        ({0: ECHO, 1: ("error", "ValueError: no")}, supervise.FAILURE_GRACE_S),
        ({0: ("error", "ValueError: no"), 1: ECHO}, supervise.FAILURE_GRACE_S),
    ],
)
def test_known_cause_shortens_the_wait_for_peers(
    monkeypatch: pytest.MonkeyPatch, reports: dict[int, tuple[str, str]], settled_s: float
) -> None:
    clock = Clock().rules(monkeypatch, supervise)
    assert watch(Scripted([1, 1, None], reports)).outcome == "error"
    assert clock.now - 100 == pytest.approx(settled_s, abs=2 * supervise.POLL_INTERVAL_S)


def test_hang_names_the_rank_with_the_smallest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().rules(monkeypatch, supervise)
    ending = watch(Scripted([None, None, None], {}))
    assert ending.outcome == "hang"
    assert "rank 0 is behind at step 5, forward, after all_gather #40 on tp; rank 1 waits" in ending.reason


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


def test_interrupted_launch_names_rank_positions() -> None:
    ending = watch(Scripted([None, None, None], {}), interrupted=lambda: "stopped by the user")
    assert ending.outcome == "interrupted"
    assert "rank 1 was at step 5" in ending.reason


class Timed(Scripted):
    """A launch of two experiments that take one second each."""

    def __init__(self, clock: Clock, timeout_s: float):
        super().__init__([None] * 3, {})
        limits = {"timeout_s": timeout_s}
        self.job = Job(experiments=[experiment("a", **limits), experiment("b", **limits)])
        self.clock, self.began = clock, clock.now

    def poll(self, rank: int) -> int | None:
        return 0 if self.clock.now > self.began + 2 else None

    def position(self, rank: int) -> Position:
        index = int(self.clock.now > self.began + 1)
        return Position(index, 5, "forward", 40, "all_gather", "tp", self.clock.now)


def test_time_limit_applies_to_each_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experiments of 1 s in one launch meet a limit of 1.5 s."""
    ending = watch(Timed(Clock().rules(monkeypatch, supervise), timeout_s=1.5))
    assert ending.outcome == "ok"
    assert ending.spent_s == pytest.approx([1, 1], abs=0.1)


def test_timeout_names_the_positions_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = watch(Timed(Clock().rules(monkeypatch, supervise), timeout_s=0.5))
    assert (ending.outcome, ending.experiment) == ("timeout", 0)
    assert "ranks 0, 1, 2 at step 5, forward, after all_gather #40 on tp" in ending.reason


def test_start_up_has_a_longer_hang_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().rules(monkeypatch, supervise)
    scripted = Scripted([None] * 3, {})
    monkeypatch.setattr(scripted, "position", lambda rank: Position(0, 0, "start", 0, "", "", 0.0))
    ending = watch(scripted)
    assert (ending.outcome, ending.experiment) == ("hang", -1)
    assert "no progress for 120 s: rank 0 is at start-up" in ending.reason
    assert clock.now > 100 + 120


def test_ranks_divide_cores_unless_the_user_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert rank_environment(0, 1)["OMP_NUM_THREADS"] == str(cores)
    assert rank_environment(0, 1000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert rank_environment(1, 2)["OMP_NUM_THREADS"] == "7"
    assert rank_environment(1, 2)["RANK"] == "1"


def test_out_of_memory_errors_are_classified_as_oom() -> None:
    class OutOfMemoryError(RuntimeError):
        """An error with the class name of torch.cuda."""

    errors = [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ]
    assert {rank_program.classify_error(error) for error in errors} == {"oom"}
    unsupported = RuntimeError("could not create a primitive descriptor for a matmul primitive")
    assert rank_program.classify_error(unsupported) == "error"
    assert rank_program.classify_error(ValueError("out of memory is not what this is")) == "error"
    assert rank_program.classify_error(FloatingPointError("nan")) == "diverged"


def test_saved_job_equals_loaded_job(tmp_path: Path) -> None:
    job = Job(experiments=[experiment("a"), experiment("b")], rounds=3, compare=True)
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_signal_name_of_known_and_unknown_numbers() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(999) == "signal 999"


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_only_ranks_with_checkpoints_end_on_request(checkpoint_every: int) -> None:
    scripted = Scripted([None] * 3, {})
    trained = experiment("a")
    trained = replace(trained, training=replace(trained.training, checkpoint_every=checkpoint_every))
    scripted.job = Job(experiments=[trained])
    ending = watch(scripted, interrupted=lambda: "stopped by the user")
    assert ending.outcome == "interrupted"
    assert ending.reason.startswith("stopped by the user")
    assert ("stopped on request" in ending.reason) == bool(checkpoint_every)
