"""Tests of the end of a launch and its reason, mostly with scripted ranks; `tests/test_faults.py` has real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro.config import Experiment, Layout, Limits, Training
from repro.launch import supervise
from repro.launch.failures import FAILURE_CLASSES, failure_class
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank_process import Position
from repro.launch.supervise import Ending, watch
from tests.clock import Clock
from tests.launch.fake_session import ABORTS
from tests.launch.runs import FAKE
from tests.training import TINY

TICK = 1 / 16
STARTS = "rank 0 was at start-up"
AT, AT_41, AT_42 = (
    f"at step 5, forward, after collective all_gather #{sequence} in group tp" for sequence in (40, 41, 42)
)
ECHO = ("error", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
CAUSE = ("error", "ValueError")
KILLED = "was killed by signal"


Reports = dict[int, tuple[str, str]]
"""Outcome and reason that ranks reported, by rank."""


def experiment(name: str, checkpoint_every: int = 0, **limits: Any) -> Experiment:
    return Experiment(
        name=name,
        model=TINY,
        layout=Layout(dp=2),
        training=Training(steps=6, untimed_steps=1, checkpoint_every=checkpoint_every),
        limits=Limits(**{"hang_s": 60.0, **limits}),
    )


class Scripted:
    """A launch of one experiment without processes, whose exit codes and reports a test chooses."""

    def __init__(
        self, codes: list[int | None], reports: Reports | None = None, text: str = "", **settings: Any
    ):
        """Store exit codes by rank, reports, the standard error of every rank, and settings of the experiment."""
        self.codes, self.reports, self.text, self.killed = codes, reports or {}, text, False
        self.world = len(codes)
        self.job = Job(experiments=[experiment("a", **settings)])

    def poll(self, rank: int) -> int | None:
        return self.codes[rank]

    def position(self, rank: int) -> Position:
        return Position(0, 5, "forward", 40 + rank, "all_gather", "tp", 1.0)

    def stopped(self, rank: int) -> bool:
        return False

    def report(self, rank: int) -> dict[str, Any] | None:
        if rank not in self.reports:
            return None
        outcome, reason = self.reports[rank]
        return {"rank": rank, "outcome": outcome, "reason": reason}

    def error_text(self, rank: int) -> str:
        return self.text

    def dump_stacks(self) -> None: ...
    def ask_to_stop(self) -> None:
        """End the ranks that still run, each with the report of a stop."""
        for rank in (rank for rank, code in enumerate(self.codes) if code is None):
            self.codes[rank], self.reports[rank] = 5, ("interrupted", "stopped on request")

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    assert supervise.POLL_INTERVAL_S < 0.1, "suites have many short launches"
    monkeypatch.setattr(supervise, "POLL_INTERVAL_S", TICK)  # sums of ticks are exact
    return Clock().rules(monkeypatch, supervise)


class EqualRanks(Scripted):
    """Ranks with equal positions, of which the first `stopped` ranks are stopped."""

    def __init__(self, world: int, phase: str = "forward", stopped: int = 0, **limits: float):
        super().__init__([None] * world, **limits)
        self.phase, self.halted = phase, stopped

    def position(self, rank: int) -> Position:
        return super().position(0)._replace(phase=self.phase)

    def stopped(self, rank: int) -> bool:
        return rank < self.halted


@pytest.mark.parametrize(
    ("phase", "limits", "after", "message"),
    [
        ("forward", {"hang_s": 2.0}, 2.0, f"no progress for 2 s (limits.hang_s): rank 0 is {AT}"),
        ("start", {"hang_s": 2.0}, supervise.START_TIMEOUT_S, "no progress for 120 s: rank 0 is at start-up"),
        ("start", {"hang_s": 200.0}, 200.0, "no progress for 200 s (limits.hang_s): rank 0 is at start-up"),
        ("forward", {"hang_s": 2.0, "timeout_s": 1.0}, 1.0,
         f"the experiment did not end within 1 s (limits.timeout_s) (rank 0 was {AT})"),
        ("start", {"hang_s": 0.0, "timeout_s": 500.0}, 500.0,
         f"the experiment did not end within 500 s (limits.timeout_s) ({STARTS})"),
    ],
)  # fmt: skip
def test_launch_ends_one_tick_after_its_limit(
    clock: Clock, phase: str, limits: dict[str, float], after: float, message: str
) -> None:
    ending = watch(EqualRanks(1, phase, **limits))
    assert (ending.outcome, ending.reason) == ("hang" if "progress" in message else "timeout", message)
    assert clock.now - 100 == ending.spent_s[0] == after + TICK
    assert ending.experiment == (-1 if phase == "start" else 0)


def test_time_limit_applies_to_each_experiment(clock: Clock) -> None:
    """Two experiments of 1 s in one launch meet a limit of 1.5 s."""

    class Sequence(Scripted):
        def poll(self, rank: int) -> int | None:
            return 0 if clock.now > 102 else None

        def position(self, rank: int) -> Position:
            return super().position(rank)._replace(experiment=int(clock.now > 101))

    fake = Sequence([None])
    fake.job = Job(experiments=[experiment(name, timeout_s=1.5) for name in "ab"])
    assert watch(fake) == Ending("ok", "", 1, [1.0, 1.0 + TICK])


def test_heartbeat_of_any_rank_counts_as_progress(clock: Clock) -> None:
    class Slow(EqualRanks):
        def position(self, rank: int) -> Position:
            heartbeat_s = min(clock.now, 103.0) if rank else 1.0
            return super().position(rank)._replace(seconds=heartbeat_s)

    assert watch(Slow(2, hang_s=2.0)).outcome == "hang"
    assert clock.now == 103.0 + 2.0 + TICK


@pytest.mark.parametrize(
    ("codes", "reports", "after", "outcome", "rank"),
    [
        ([1, None], {0: ECHO}, supervise.ECHO_GRACE_S + TICK, "error", 0),
        ([1, None], {0: CAUSE}, supervise.FAILURE_GRACE_S + TICK, "error", 0),
        ([1, 1, None], {0: CAUSE, 1: ECHO}, supervise.FAILURE_GRACE_S + TICK, "error", 0),
        ([1, 1], {0: ECHO, 1: ("error", "broken pipe")}, 0.0, "error", 0),
        ([1, 0], {0: CAUSE}, 0.0, "error", 0),
        # A cause takes precedence over errors of peers.
        ([1, 3, 1], {0: ECHO, 1: ("oom", "MemoryError"), 2: ECHO}, 0.0, "oom", 1),
        ([1, 1, -9], {0: ECHO, 1: ECHO}, 0.0, "error", 2),
        ([1, 1, 1], {0: ECHO, 1: ("error", "ValueError: no"), 2: ECHO}, 0.0, "error", 1),
        ([-9, 3, 1], {1: ("oom", "MemoryError"), 2: ECHO}, 0.0, "oom", 1),
        ([1, 4, 4], {0: ECHO, 1: ("diverged", "nan"), 2: ("diverged", "nan")}, 0.0, "diverged", 1),
    ],
)
def test_failure_waits_for_reports_of_other_ranks_and_names_the_cause(
    clock: Clock, codes: list[int | None], reports: Reports, after: float, outcome: str, rank: int
) -> None:
    scripted = Scripted(codes, reports)
    ending = watch(scripted)
    assert (ending.outcome, clock.now - 100, scripted.killed) == (outcome, after, True)
    place = (AT, AT_41, AT_42)[rank]
    cause = f"{place}: {reports[rank][1]}" if rank in reports else f"{KILLED} 9 (SIGKILL) {place}"
    assert ending.reason == f"rank {rank} {cause}"


def test_ranks_are_killed_after_the_stop_timeout(clock: Clock) -> None:
    class UnresponsiveRanks(Scripted):
        stop_requests = 0

        def ask_to_stop(self) -> None:
            self.stop_requests += 1

    fake = UnresponsiveRanks([None, None], checkpoint_every=2)
    ticks: list[tuple[float, int]] = []
    ending = watch(
        fake,
        interrupted=lambda: "stopped by the user",
        stop_s=lambda: 1.0,
        tick=lambda position, spent_s: ticks.append((clock.now - 100, position.sequence)),
    )
    assert ending.outcome == "interrupted"
    assert ending.reason == f"stopped by the user (rank 0 was {AT}; rank 1 was {AT_41})"
    assert (fake.stop_requests, clock.now - 100) == (1, 1.0)
    assert ticks == [(number * TICK, 40) for number in range(16)], "ticks report the position of rank 0"


@pytest.mark.parametrize(
    ("code", "reports", "checkpoint_every", "why", "outcome", "reason"),
    [
        # Only ranks with checkpoints end on request.
        (None, {}, 0, "preempted", "interrupted", f"preempted (rank 0 was {AT})"),
        (None, {}, 2, "preempted", "interrupted", f"preempted: rank 0 {AT}: stopped on request"),
        (5, {0: ("interrupted", "after step 5")}, 2, "", "interrupted", f"rank 0 {AT}: after step 5"),
        (5, {0: ("oom", "MemoryError")}, 2, "preempted", "oom", f"rank 0 {AT}: MemoryError"),
    ],
)
@pytest.mark.usefixtures("clock")
def test_reason_of_an_interrupt_precedes_the_report(
    code: int | None, reports: Reports, checkpoint_every: int, why: str, outcome: str, reason: str
) -> None:
    fake = Scripted([code], dict(reports), checkpoint_every=checkpoint_every)
    ending = watch(fake, interrupted=lambda: why)
    assert (ending.outcome, ending.reason, ending.experiment) == (outcome, reason, 0)


def test_hang_names_a_limited_number_of_ranks(clock: Clock) -> None:
    hang, stopped = "no progress for 2 s (limits.hang_s): ", "is stopped (SIGSTOP or a debugger)"
    assert watch(Scripted([None] * 3, hang_s=2.0)).reason == (
        f"{hang}rank 0 is behind {AT}; rank 1 waits {AT_41}; rank 2 waits {AT_42}"
    )
    assert watch(EqualRanks(7, stopped=6, hang_s=2.0)).reason == (
        hang
        + "; ".join(f"rank {rank} {stopped} {AT}" for rank in range(4))
        + f"; the same applies to 2 more ranks; rank 6 waits {AT}"
    )
    assert watch(EqualRanks(4, stopped=4, hang_s=2.0)).reason.endswith(f"; rank 3 {stopped} {AT}")
    for world, names in ((8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")):
        ending = watch(EqualRanks(world), interrupted=lambda: "stopped")
        assert ending.reason == f"stopped (ranks {names} {AT})"


LIMIT = {"memory_bytes": 50_000_000}
OK: Reports = {0: ("ok", "")}
"""Report of success, which a later signal contradicts."""


@pytest.mark.usefixtures("clock")
def test_exit_without_a_failure_report_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, text, settings, reports, kills, outcome, reason in (
        (7, "Traceback\nlast words\n", {}, {}, 3, "error", f"ended with exit code 7 {AT}: last words"),
        (1, "x" * 301 + "\n", {}, {}, 3, "error", f"ended with exit code 1 {AT}: {'x' * 300}"),
        (1, "", {}, {}, 3, "error", f"ended with exit code 1 {AT}"),
        (-35, "", {}, {}, 3, "error", f"{KILLED} 35 (signal 35) {AT}"),
        (-6, ABORTS["abort-in-torch"], {}, {}, 3, "oom", f"{KILLED} 6 (SIGABRT) {AT}: can't allocate memory"),
        (-6, ABORTS["abort-otherwise"], {}, {}, 3, "error", f"{KILLED} 6 (SIGABRT) {AT}"),
        (-6, ABORTS["watchdog-device"], {}, {}, 3, "error",
         f"{KILLED} 6 (SIGABRT) {AT}: CUDA error: an illegal memory access was encountered"),
        (-6, ABORTS["watchdog"], {}, {}, 3, "error",
         f"{KILLED} 6 (SIGABRT) {AT}: NCCL's watchdog: NCCL error: remote process exited or there was a network "
         "error, NCCL version 2.21.5"),
        # Libraries such as oneDNN access memory after a failed allocation.
        (-11, "", LIMIT, {}, 3, "oom",
         f"{KILLED} 11 (SIGSEGV) {AT}: probably the memory limit of 50 MB denied an allocation of a library"),
        (-11, "", {}, {}, 3, "error", f"{KILLED} 11 (SIGSEGV) {AT}"),
        # Only a kill by the kernel during the launch explains SIGKILL.
        (-9, "", {}, OK, 4, "oom", f"{KILLED} 9 (SIGKILL) {AT}: the kernel ran out of memory"),
        (-9, "", {}, OK, 3, "error", f"{KILLED} 9 (SIGKILL) {AT}"),
        (-15, "", {}, OK, 4, "error", f"{KILLED} 15 (SIGTERM) {AT}"),
    ):  # fmt: skip
        counts = iter([3, kills])
        monkeypatch.setattr(supervise, "count_kernel_oom_kills", lambda counts=counts: next(counts))
        ending = watch(Scripted([code], reports, text, **settings))
        assert ending == Ending(outcome, f"rank 0 {reason}", 0, [0.0])


def test_oom_kills_are_counted_per_cgroup_or_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert supervise.count_kernel_oom_kills() == 0
    cgroup, vmstat, events = "proc/self/cgroup", "proc/vmstat", "sys/fs/cgroup/a/b/memory.events"
    for written, count in (
        # Version 1 of cgroups has no such count.
        ({cgroup: "12:memory:/x\n1:name=systemd:/z\n", vmstat: "nr_free 7\noom_kill 9\n"}, 9),
        ({cgroup: "12:memory:/x\n0::/a/b\n"}, 9),
        ({events: "low 1\noom 6\noom_kill 5\n"}, 5),
        ({events: "low 1\n"}, 9),
        ({vmstat: "no number of words\n"}, 0),
    ):
        for name, text in written.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        assert supervise.count_kernel_oom_kills() == count


AT_REAL = "at step {}, backward, after collective all_reduce #{} in group dp"
FIRST_CAUSES = {
    "abort:b:0:1": ("oom", f"rank 0 {KILLED} 6 (SIGABRT) {AT_REAL.format(1, 8)}: std::bad_alloc"),
    # NCCL's watchdog aborts a rank whose peer failed, here before the peer reports the cause.
    "watchdog:b:1:2,raise-late:b:0:2":
        ("error", f"rank 0 {AT_REAL.format(2, 9)}: KeyError: 'injected failure'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FIRST_CAUSES)
def test_first_cause_of_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("FAKE_FAULT", fault)
    job = Job(experiments=[experiment("a"), experiment("b")])
    launched = LocalLaunch(job, tmp_path / "logs", target=FAKE)
    launched.start()
    ending = watch(launched)
    assert all(launched.poll(rank) is not None for rank in range(2)), "a rank was not reaped"
    assert (ending.outcome, ending.reason, ending.experiment) == (*FIRST_CAUSES[fault], 1)
    assert launched.results(0) is not None, "the results of the finished experiment are lost"
    assert launched.results(1) is None
    launched.close(keep_logs=tmp_path / "kept")
    assert (tmp_path / "kept" / "rank-0.err").exists()
    assert not launched.folder.exists()
    assert not launched.logs.exists()


PIPELINE = Experiment(
    name="p", model=TINY, layout=Layout(tp=2, pp=2, global_batch=4), training=Training(steps=6)
)


def test_lagging_ranks_ignore_other_stages() -> None:
    for states, expected in (
        # (step, phase, sequence) of ranks 0, 1 (stage 0) and 2, 3 (stage 1), which issue more collectives.
        ([(5, "idle", 40), (5, "idle", 40), (5, "forward", 90), (5, "forward", 91)], [2]),
        ([(5, "forward", 40), (5, "forward", 40), (5, "forward", 90), (5, "forward", 91)], [2]),
        ([(5, "idle", 40), (5, "idle", 40), (5, "backward", 91), (5, "backward", 91)], [2, 3]),
        ([(5, "forward", 40), (5, "forward", 40), (4, "optimizer", 91), (4, "idle", 91)], [2]),
        ([(5, "forward", 41), (5, "forward", 40), (5, "idle", 91), (5, "idle", 91)], [1]),
        ([(5, "idle", 40), (5, "idle", 40), (5, "idle", 91), (5, "idle", 91)], [0, 1, 2, 3]),
    ):
        positions = [Position(0, *state, "send", "pp", 1.0) for state in states]
        assert supervise.lagging_ranks(positions, Job(experiments=[PIPELINE])) == expected, states


def test_failure_class_of_outcome_and_job_state() -> None:
    for outcome, reason, state, expected in (
        ("ok", "", "", ""),
        ("diverged", "loss is nan at step 3", "", ""),
        ("oom", "rank 1 at step 3: MemoryError", "", "out-of-memory"),
        ("timeout", "the experiment did not end within 2 s (limits.timeout_s)", "", "time-out"),
        ("hang", "no progress for 60 s (limits.hang_s): rank 1 is behind", "", "hang"),
        ("error", "rank 1 was killed by signal 9 (SIGKILL) at step 1", "", "rank-killed"),
        ("error", "rank 3 at step 1: DistBackendError: NCCL error in: x.cpp", "", "nccl"),
        ("error", "rank 2 at step 4: lost node n2: no answer from the node for 15 s", "COMPLETED", "lost-node"),
        ("error", "wrong hardware: node n2 has no GPU, but ...", "", "wrong-hardware"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 was at start-up)", "", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): time limit (rank 0 ...)", "", "time-limit"),
        ("interrupted", "stopped by SLURM (SIGTERM): preempted, or the job reached its time limit",
         "CANCELLED by 0", "cancelled"),
        ("interrupted", "node failure on n2", "NODE_FAIL", "node-failure"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "FAILED", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "TIMEOUT", "time-limit"),
        ("interrupted", "stopped", "FAILED", "error"),
        ("", "", "FAILED", "error"),
        ("", "", "OUT_OF_MEMORY", "out-of-memory"),
        ("", "", "RUNNING", ""),
        ("error", "rank 0 ended with exit code 7 at step 1", "", "error"),
    ):  # fmt: skip
        assert failure_class(outcome, reason, state) == expected, (outcome, reason, state)
        assert expected in ("", *FAILURE_CLASSES)
