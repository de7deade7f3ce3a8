"""Tests of the end of a watched launch on a simulated clock: its time and the reported reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.launch import supervise
from repro.launch.job import Job
from repro.launch.rank_process import Position
from repro.launch.supervise import Ending, watch
from tests.clock import Clock
from tests.launch.scripted import Scripted, experiment

TICK = 1 / 16
KILLED = "rank 0 was killed by signal 9 (SIGKILL)"
STARTS = "rank 0 was at start-up"
AT = "at step 5, forward, after all_gather #{} on tp"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(supervise, "POLL_INTERVAL_S", TICK)  # sums of ticks are exact
    return Clock().rules(monkeypatch, supervise)


class EqualRanks(Scripted):
    """Ranks with equal positions, of which the first `stopped` ranks are stopped."""

    def __init__(self, world: int, phase: str = "forward", stopped: int = 0, **limits: float):
        super().__init__([None] * world, {})
        self.phase, self.halted = phase, stopped
        self.job = Job(experiments=[experiment("a", **limits)])

    def position(self, rank: int) -> Position:
        return Position(0, 5, self.phase, 40, "all_gather", "tp", 1.0)

    def stopped(self, rank: int) -> bool:
        return rank < self.halted


@pytest.mark.parametrize(
    ("phase", "limits", "after", "message"),
    [
        ("forward", {"hang_s": 2.0}, 2.0, "no progress for 2 s (limits.hang_s): rank 0 is " + AT.format(40)),
        ("start", {"hang_s": 2.0}, supervise.START_TIMEOUT_S, "no progress for 120 s: rank 0 is at start-up"),
        ("start", {"hang_s": 200.0}, 200.0, "no progress for 200 s (limits.hang_s): rank 0 is at start-up"),
        (
            "forward",
            {"hang_s": 2.0, "timeout_s": 1.0},
            1.0,
            f"not done after 1 s (limits.timeout_s) (rank 0 was {AT.format(40)})",
        ),
        ("start", {"hang_s": 0.0, "timeout_s": 500.0}, 500.0, f"not done after 500 s (limits.timeout_s) ({STARTS})"),
    ],
)  # fmt: skip
def test_launch_ends_one_tick_after_its_limit(
    clock: Clock, phase: str, limits: dict[str, float], after: float, message: str
) -> None:
    ending = watch(EqualRanks(1, phase, **limits))
    assert (ending.outcome, ending.reason) == ("hang" if "progress" in message else "timeout", message)
    assert clock.now - 100 == ending.spent_s[0] == after + TICK
    assert ending.experiment == (-1 if phase == "start" else 0)


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
        ([1, None], {0: ("error", "Connection closed by peer")}, supervise.ECHO_GRACE_S + TICK),
        ([1, None], {0: ("error", "ValueError")}, supervise.FAILURE_GRACE_S + TICK),
        ([1, 1], {0: ("error", "Connection closed by peer"), 1: ("error", "broken pipe")}, 0.0),
        ([1, 0], {0: ("error", "ValueError")}, 0.0),
    ],
)
def test_failure_waits_for_reports_of_other_ranks(
    clock: Clock, codes: list[int | None], reports: dict[int, tuple[str, str]], after: float
) -> None:
    ending = watch(Scripted(codes, reports))
    assert (ending.outcome, clock.now - 100) == ("error", after)
    assert ending.reason == f"rank 0 {AT.format(40)}: {reports[0][1]}"


def test_end_of_all_ranks_is_noticed_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites have many short launches, so a launch ends at most 0.1 s after its ranks."""
    clock = Clock().rules(monkeypatch, supervise)

    class Short(Scripted):
        def poll(self, rank: int) -> int | None:
            return 0 if clock.now > 100.02 else None

    assert watch(Short([None, None], {})).outcome == "ok"
    assert clock.now < 100.12


def test_ranks_are_killed_after_the_stop_timeout(clock: Clock) -> None:
    class UnresponsiveRanks(Scripted):
        stop_requests = 0

        def ask_to_stop(self) -> None:
            self.stop_requests += 1

    fake = UnresponsiveRanks([None, None], {})
    trained = experiment("a", hang_s=50.0)
    fake.job = Job(experiments=[replace(trained, training=replace(trained.training, checkpoint_every=2))])
    ticks: list[tuple[float, int]] = []
    ending = watch(
        fake,
        interrupted=lambda: "stopped by the user",
        stop_s=lambda: 1.0,
        tick=lambda position, spent_s: ticks.append((clock.now - 100, position.sequence)),
    )
    both = f"rank 0 was {AT.format(40)}; rank 1 was {AT.format(41)}"
    assert (ending.outcome, ending.reason) == ("interrupted", f"stopped by the user ({both})")
    assert (fake.stop_requests, clock.now - 100) == (1, 1.0)
    assert ticks == [(number * TICK, 40) for number in range(16)], "ticks report the position of rank 0"


def test_reason_names_a_limited_number_of_ranks(clock: Clock) -> None:
    at = AT.format(40)
    assert watch(EqualRanks(7, stopped=6, hang_s=2.0)).reason == (
        "no progress for 2 s (limits.hang_s): "
        + "; ".join(f"rank {rank} is stopped (SIGSTOP or a debugger) {at}" for rank in range(4))
        + f"; 2 more ranks likewise; rank 6 waits {at}"
    )
    assert watch(EqualRanks(4, stopped=4, hang_s=2.0)).reason.endswith(
        f"; rank 3 is stopped (SIGSTOP or a debugger) {at}"
    )
    for world, names in ((8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")):
        assert (
            watch(EqualRanks(world), interrupted=lambda: "stopped").reason == f"stopped (ranks {names} {at})"
        )


@pytest.mark.parametrize(
    ("code", "text", "kills", "outcome", "reason"),
    [
        (7, "Traceback\nlast words\n", [3], "error", f"rank 0 ended with exit code 7 {AT.format(40)}: last words"),
        (1, "x" * 301 + "\n", [3], "error", f"rank 0 ended with exit code 1 {AT.format(40)}: {'x' * 300}"),
        (1, "", [3], "error", f"rank 0 ended with exit code 1 {AT.format(40)}"),
        (-9, "", [3, 4], "oom", f"{KILLED} {AT.format(40)}: the kernel ran out of memory"),
        (-9, "", [3, 3], "error", f"rank 0 was killed by signal 9 (SIGKILL) {AT.format(40)}"),
        (-15, "", [3, 4], "error", f"rank 0 was killed by signal 15 (SIGTERM) {AT.format(40)}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reports", [{}, {0: ("ok", "")}], ids=["no report", "ok report"])
def test_exit_without_failure_report_is_described_by_exit_code(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    text: str,
    kills: list[int],
    outcome: str,
    reason: str,
    reports: dict[int, tuple[str, str]],
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(supervise, "count_kernel_oom_kills", lambda: next(counts))
    assert watch(Scripted([code], reports, text)) == Ending(outcome, reason, 0, [0.0])


def test_interrupt_reason_precedes_the_report(clock: Clock) -> None:
    stopped = ("interrupted", "stopped on request after step 5")
    for why, failed, reason in (
        ("preempted", stopped, f"preempted: rank 0 {AT.format(40)}: {stopped[1]}"),
        ("", stopped, f"rank 0 {AT.format(40)}: {stopped[1]}"),
        ("preempted", ("oom", "MemoryError"), f"rank 0 {AT.format(40)}: MemoryError"),
    ):
        fake = Scripted([5], {0: failed})
        trained = experiment("a")
        fake.job = Job(experiments=[replace(trained, training=replace(trained.training, checkpoint_every=2))])
        fake.ask_to_stop = lambda: None  # type: ignore[method-assign]
        assert watch(fake, interrupted=lambda why=why: why) == Ending(failed[0], reason, 0, [0.0])  # type: ignore[misc]


def test_oom_kills_are_counted_per_cgroup_or_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert supervise.count_kernel_oom_kills() == 0

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/self/cgroup", "12:memory:/x\n1:name=systemd:/z\n")
    write("proc/vmstat", "nr_free 7\noom_kill 9\n")
    assert supervise.count_kernel_oom_kills() == 9, "cgroup version 1 has no such count"
    write("proc/self/cgroup", "12:memory:/x\n0::/a/b\n")
    assert supervise.count_kernel_oom_kills() == 9
    write("sys/fs/cgroup/a/b/memory.events", "low 1\noom 6\noom_kill 5\n")
    assert supervise.count_kernel_oom_kills() == 5
    write("sys/fs/cgroup/a/b/memory.events", "low 1\n")
    assert supervise.count_kernel_oom_kills() == 9
    write("proc/vmstat", "no number of words\n")
    assert supervise.count_kernel_oom_kills() == 0
