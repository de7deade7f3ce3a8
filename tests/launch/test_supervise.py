"""Tests of the supervision of a launch: when a launch ends, and which reason is reported.

Most launches are scripted and run on a simulated clock. `tests/test_faults.py` has real ranks.
"""

from __future__ import annotations

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
from tests.launch.fake_session import ABORTS
from tests.launch.runs import FAKE
from tests.launch.scripted import MODEL, Reports, Scripted, experiment

TICK = 1 / 16
STARTS = "rank 0 was at start-up"
AT, AT_41, AT_42 = (
    f"at step 5, forward, after collective all_gather #{sequence} in group tp" for sequence in (40, 41, 42)
)
ECHO = ("error", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
CAUSE = ("error", "ValueError")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
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
        (
            "forward",
            {"hang_s": 2.0, "timeout_s": 1.0},
            1.0,
            f"the experiment did not end within 1 s (limits.timeout_s) (rank 0 was {AT})",
        ),
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
    ("codes", "reports", "after"),
    [
        ([1, None], {0: ECHO}, supervise.ECHO_GRACE_S + TICK),
        ([1, None], {0: CAUSE}, supervise.FAILURE_GRACE_S + TICK),
        ([1, 1, None], {0: CAUSE, 1: ECHO}, supervise.FAILURE_GRACE_S + TICK),
        ([1, 1], {0: ECHO, 1: ("error", "broken pipe")}, 0.0),
        ([1, 0], {0: CAUSE}, 0.0),
    ],
)
def test_failure_waits_for_reports_of_other_ranks(
    clock: Clock, codes: list[int | None], reports: Reports, after: float
) -> None:
    ending = watch(Scripted(codes, reports))
    assert (ending.outcome, clock.now - 100) == ("error", after)
    assert ending.reason == f"rank 0 {AT}: {reports[0][1]}"


def test_end_of_all_ranks_is_noticed_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites have many short launches, so a launch ends at most 0.1 s after its ranks."""
    clock = Clock().rules(monkeypatch, supervise)

    class Short(Scripted):
        def poll(self, rank: int) -> int | None:
            return 0 if clock.now > 100.02 else None

    assert watch(Short([None, None])).outcome == "ok"
    assert clock.now < 100.12


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
    ("checkpoint_every", "reason"),
    [(0, f"stopped by the user (rank 0 was {AT})"), (2, f"stopped by the user: rank 0 {AT}: stopped on request")],
)  # fmt: skip
def test_only_ranks_with_checkpoints_end_on_request(clock: Clock, checkpoint_every: int, reason: str) -> None:
    ending = watch(
        Scripted([None], checkpoint_every=checkpoint_every), interrupted=lambda: "stopped by the user"
    )
    assert (ending.outcome, ending.reason) == ("interrupted", reason)


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


KILLED = "was killed by signal"
LIMIT = {"memory_bytes": 50_000_000}


@pytest.mark.parametrize(
    ("code", "text", "settings", "outcome", "reason"),
    [
        (7, "Traceback\nlast words\n", {}, "error", f"ended with exit code 7 {AT}: last words"),
        (1, "x" * 301 + "\n", {}, "error", f"ended with exit code 1 {AT}: {'x' * 300}"),
        (1, "", {}, "error", f"ended with exit code 1 {AT}"),
        (-35, "", {}, "error", f"{KILLED} 35 (signal 35) {AT}"),
        (-6, ABORTS["abort-in-torch"], {}, "oom", f"{KILLED} 6 (SIGABRT) {AT}: can't allocate memory"),
        (-6, ABORTS["abort-otherwise"], {}, "error", f"{KILLED} 6 (SIGABRT) {AT}"),
        (-6, ABORTS["watchdog-device"], {}, "error",
         f"{KILLED} 6 (SIGABRT) {AT}: CUDA error: an illegal memory access was encountered"),
        (-6, ABORTS["watchdog"], {}, "error",
         f"{KILLED} 6 (SIGABRT) {AT}: NCCL's watchdog: NCCL error: remote process exited or there was a network "
         "error, NCCL version 2.21.5"),
        # Libraries such as oneDNN access memory after a failed allocation.
        (-11, "", LIMIT, "oom",
         f"{KILLED} 11 (SIGSEGV) {AT}: probably the memory limit of 50 MB denied an allocation of a library"),
        (-11, "", {}, "error", f"{KILLED} 11 (SIGSEGV) {AT}"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("clock")
def test_exit_without_a_report_is_described_by_exit_code_and_error_text(
    code: int, text: str, settings: dict[str, Any], outcome: str, reason: str
) -> None:
    ranks = Scripted([code], {}, text, **settings)
    assert watch(ranks) == Ending(outcome, f"rank 0 {reason}", 0, [0.0])


@pytest.mark.parametrize(
    ("code", "kills", "outcome", "reason"),
    [
        (-9, [3, 4], "oom", f"{KILLED} 9 (SIGKILL) {AT}: the kernel ran out of memory"),
        (-9, [3, 3], "error", f"{KILLED} 9 (SIGKILL) {AT}"),
        (-15, [3, 4], "error", f"{KILLED} 15 (SIGTERM) {AT}"),
    ],
)
def test_kernel_oom_kill_during_the_launch_explains_sigkill(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int, kills: list[int], outcome: str, reason: str
) -> None:
    """The rank reported success before the signal, which the signal contradicts."""
    counts = iter(kills)
    monkeypatch.setattr(supervise, "count_kernel_oom_kills", lambda: next(counts))
    assert watch(Scripted([code], {0: ("ok", "")})) == Ending(outcome, f"rank 0 {reason}", 0, [0.0])


@pytest.mark.parametrize(
    ("why", "failed", "reason"),
    [
        ("preempted", ("interrupted", "after step 5"), f"preempted: rank 0 {AT}: after step 5"),
        ("", ("interrupted", "after step 5"), f"rank 0 {AT}: after step 5"),
        ("preempted", ("oom", "MemoryError"), f"rank 0 {AT}: MemoryError"),
    ],
)
def test_interrupt_reason_precedes_the_report(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str, failed: tuple[str, str], reason: str
) -> None:
    fake = Scripted([5], {0: failed}, checkpoint_every=2)
    monkeypatch.setattr(fake, "ask_to_stop", lambda: None)
    assert watch(fake, interrupted=lambda: why) == Ending(failed[0], reason, 0, [0.0])


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
    "watchdog:b:1:2,raise-late:b:0:2": (
        "error",
        f"rank 0 {AT_REAL.format(2, 9)}: KeyError: 'injected failure'",
    ),
}


@pytest.mark.parametrize("fault", FIRST_CAUSES)
def test_reason_names_the_first_cause_of_real_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
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
