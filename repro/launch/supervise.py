"""Supervision of the ranks of one launch until it ends, with the first cause of a failure.

When one rank dies, its peers fail a moment later in their collectives ("connection closed by peer"), or NCCL's watchdog
ends them.  After a first failure the other ranks therefore have a grace time to report.  The cause is then chosen by
severity: an out-of-memory first, an echo of a lost peer last.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from repro.config.enums import Phase
from repro.launch.failures import classify_abort
from repro.launch.job import STOP_TIMEOUT_S, Job
from repro.launch.rank_process import Position

POLL_INTERVAL_S = 0.05
FAILURE_GRACE_S = 2.0
"""Time in which other ranks may report after the first failure, in seconds."""
ECHO_GRACE_S = 10.0
"""Value of `FAILURE_GRACE_S` while every failure is an echo of a lost peer, in seconds."""
START_TIMEOUT_S = 120.0
"""Minimum time before a hang is reported while ranks start, in seconds: a cold disk loads torch slowly."""
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|remote process exited|socket closed"
    r"|nccl.*(remote|aborted)|read error.*closed|connectfullmesh|wait timeout",
    re.IGNORECASE,
)
_SEVERITY = ("oom", "killed", "diverged", "error", "interrupted", "echo")


class WatchedLaunch(Protocol):
    """Interface of a launch whose ranks are watched."""

    world: int
    job: Job

    def poll(self, rank: int) -> int | None: ...
    def position(self, rank: int) -> Position: ...
    def stopped(self, rank: int) -> bool: ...
    def report(self, rank: int) -> dict[str, Any] | None: ...
    def error_text(self, rank: int) -> str: ...
    def dump_stacks(self) -> None: ...
    def ask_to_stop(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Ending:
    """End of a launch.  `experiment` is the index of the running experiment, -1 before the first."""

    outcome: str
    reason: str
    experiment: int
    spent_s: list[float]
    """Wall-clock seconds of each experiment of the job."""


@dataclass
class _Failure:
    severity: str
    rank: int
    seen: float
    reason: str

    @property
    def outcome(self) -> str:
        return "error" if self.severity in ("killed", "echo") else self.severity


def watch(
    launch: WatchedLaunch,
    *,
    interrupted: Callable[[], str] = lambda: "",
    stop_s: Callable[[], float] = lambda: STOP_TIMEOUT_S,
    tick: Callable[[Position, list[float]], None] = lambda position, spent_s: None,
) -> Ending:
    """Wait for all ranks; kill and reap them after a failure, a hang, a timeout or an interruption.

    `interrupted()` returns the reason of an interruption, or an empty string.  An interrupted experiment with
    checkpoints first gets a request to write one and to end, and `stop_s()` seconds for it.

    `tick` is called about twenty times a second with the position of rank 0 and the seconds of each experiment.
    """
    watcher = _Watcher(launch, stop_s)
    try:
        return watcher.run(interrupted, tick)
    finally:
        launch.kill()


class _Watcher:
    def __init__(self, launch: WatchedLaunch, stop_s: Callable[[], float]):
        self.launch, self.stop_s = launch, stop_s
        self.job = launch.job
        self.ranks = range(launch.world)
        self.spent = [0.0] * len(self.job.experiments)
        self.failures: list[_Failure] = []
        self.kernel_kills = count_kernel_oom_kills()
        self.last_word = [0.0] * launch.world
        self.last_progress = time.monotonic()
        self.asked: float | None = None
        """Time of the request to the ranks to end by themselves; None before."""
        self.why = ""
        """Reason of the request."""

    def run(self, interrupted: Callable[[], str], tick: Callable[[Position, list[float]], None]) -> Ending:
        before = time.monotonic()
        while True:
            ended = self._collect()
            now = time.monotonic()
            current = self._current()
            self.spent[max(0, current)] += now - before
            before = now
            self.why = interrupted()
            if self.why and not self._stops(now, current):
                return self._end("interrupted", f"{self.why} {self._where_all()}")
            if self.failures:
                if ended == len(self.ranks) or now > self._deadline():
                    return self._judge()
            elif ended == len(self.ranks):
                return self._end("ok", "")
            elif overdue := self._overdue(now, current):
                return overdue
            tick(self.launch.position(0), self.spent)
            time.sleep(POLL_INTERVAL_S)

    def _stops(self, now: float, current: int) -> bool:
        """Return whether to wait for the ranks, which got a request to write a checkpoint and to end."""
        if self.asked is None:
            writes = current >= 0 and self.job.experiments[current].training.checkpoint_every
            self.asked = now if writes else -math.inf
            if writes:
                self.launch.ask_to_stop()
        return now - self.asked < self.stop_s()

    def _collect(self) -> int:
        """Return the number of ranks that have ended, and record each new failure once."""
        ended = 0
        known = {failure.rank for failure in self.failures}
        for rank in self.ranks:
            code = self.launch.poll(rank)
            if code is None:
                continue
            ended += 1
            if code != 0 and rank not in known:
                self.failures.append(self._failure(rank, code))
        return ended

    def _failure(self, rank: int, code: int) -> _Failure:
        position = self.launch.position(rank)
        now = time.monotonic()
        report = self.launch.report(rank)
        if report is not None and report["outcome"] != "ok":
            severity = report["outcome"]
            if severity == "error" and _ECHO.search(report["reason"]):
                severity = "echo"
            return _Failure(severity, rank, now, f"rank {rank} {position}: {report['reason']}")
        if code > 0:
            text = self.launch.error_text(rank).strip().splitlines()
            error = f": {text[-1][:300]}" if text else ""
            return _Failure("error", rank, now, f"rank {rank} ended with exit code {code} {position}{error}")
        name = signal_name(-code)
        reason = f"rank {rank} was killed by signal {-code} ({name}) {position}"
        if -code == signal.SIGKILL and count_kernel_oom_kills() > self.kernel_kills:
            return _Failure("oom", rank, now, f"{reason}: the kernel ran out of memory")
        if -code == signal.SIGABRT:
            severity, why = classify_abort(self.launch.error_text(rank))
            return _Failure(severity, rank, now, f"{reason}: {why[:300]}" if why else reason)
        return _Failure("killed", rank, now, reason)

    def _deadline(self) -> float:
        only_echoes = all(failure.severity == "echo" for failure in self.failures)
        return self.failures[0].seen + (ECHO_GRACE_S if only_echoes else FAILURE_GRACE_S)

    def _judge(self) -> Ending:
        # Ranks that still run are killed in watch(), which is no failure of their own.
        first = min(self.failures, key=lambda failure: (_SEVERITY.index(failure.severity), failure.seen))
        position = self.launch.position(first.rank)
        experiment = position.experiment if position.begun else -1
        why = f"{self.why}: " if first.severity == "interrupted" and self.why else ""
        return Ending(first.outcome, why + first.reason, experiment, self.spent)

    def _overdue(self, now: float, current: int) -> Ending | None:
        limits = self.job.experiments[max(0, current)].limits
        positions = [self.launch.position(rank) for rank in self.ranks]
        words = [position.seconds for position in positions]
        patience = limits.hang_s
        if not all(position.begun for position in positions):
            patience = max(patience, START_TIMEOUT_S)
        if words != self.last_word:
            self.last_word, self.last_progress = words, now
        if limits.timeout_s and self.spent[max(0, current)] > limits.timeout_s:
            limit = f"{limits.timeout_s:g} s (limits.timeout_s)"
            return self._end("timeout", f"not done after {limit} {self._where_all()}")
        if limits.hang_s and now - self.last_progress > patience:
            self.launch.dump_stacks()
            source = " (limits.hang_s)" if patience == limits.hang_s else ""
            return self._end("hang", f"no progress for {patience:g} s{source}: {self._who_lags()}")
        return None

    def _who_lags(self) -> str:
        positions = [self.launch.position(rank) for rank in self.ranks]
        stopped = [rank for rank in self.ranks if self.launch.stopped(rank)]
        if stopped:
            laggards, what = stopped, "is stopped (SIGSTOP or a debugger)"
        else:
            laggards = lagging_ranks(positions, self.job)
            what = "is behind" if len(laggards) < len(positions) else "is"
        others = [rank for rank in self.ranks if rank not in laggards]
        text = "; ".join(f"rank {rank} {what} {positions[rank]}" for rank in laggards[:4])
        if len(laggards) > 4:
            text += f"; {len(laggards) - 4} more ranks like it"
        return text + (f"; {self._where(others, 'waits')}" if others else "")

    def _where_all(self) -> str:
        return f"({self._where(list(self.ranks), 'was')})"

    def _where(self, ranks: list[int], verb: str) -> str:
        """Describe the positions of ranks, with ranks of equal position together."""
        places: dict[str, list[str]] = {}
        for rank in ranks:
            places.setdefault(str(self.launch.position(rank)), []).append(str(rank))
        return "; ".join(
            f"rank {names[0]} {verb} {place}"
            if len(names) == 1
            else f"ranks {', '.join(names[:8])}{', ...' if len(names) > 8 else ''} {place}"
            for place, names in places.items()
        )

    def _current(self) -> int:
        """Return the index of rank 0's experiment; -1 before the first."""
        position = self.launch.position(0)
        return position.experiment if position.begun else -1

    def _end(self, outcome: str, reason: str) -> Ending:
        return Ending(outcome, reason, self._current(), self.spent)


def lagging_ranks(positions: list[Position], job: Job) -> list[int]:
    """Return the ranks that the other ranks wait for; all ranks if none differs.

    They are the ranks in the earliest step, and of these the ranks that have issued fewer collectives than others of
    their pipeline stage. Ranks of one stage issue the same collectives; ranks of different stages do not.
    """
    earliest = min((p.experiment, p.step) for p in positions)
    slow = [rank for rank, p in enumerate(positions) if (p.experiment, p.step) == earliest]
    layout = job.experiments[earliest[0]].layout
    issued: dict[int, set[int]] = {}
    for rank in slow:
        issued.setdefault(layout.index_of("pp", rank), set()).add(positions[rank].sequence)
    fewer = [
        rank
        for rank in slow
        if len(found := issued[layout.index_of("pp", rank)]) > 1 and positions[rank].sequence == min(found)
    ]
    slow = fewer or slow
    return [rank for rank in slow if positions[rank].phase != Phase.IDLE] or slow


def signal_name(number: int) -> str:
    """Return the name of a signal, for example `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_kernel_oom_kills() -> int:
    """Return the number of processes that the kernel killed for lack of memory, in this cgroup or on the machine."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        group = next((line[3:] for line in groups if line.startswith("0::")), None)
        files = [Path("/proc/vmstat")]
        if group is not None:
            files.insert(0, Path(f"/sys/fs/cgroup{group}/memory.events"))
        for file in files:
            if file.exists():
                fields = dict(line.split() for line in file.read_text().splitlines())
                if "oom_kill" in fields:
                    return int(fields["oom_kill"])
    except (OSError, ValueError):
        pass
    return 0
