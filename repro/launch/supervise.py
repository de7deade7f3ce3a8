"""Supervision of the ranks of one launch until the launch ends, and search for the first cause of a failure.

When one rank dies, its peers fail in their collectives, or NCCL's watchdog ends them.  After a first failure, the
supervisor therefore waits for other reports and selects the most severe failure: out of memory first, a lost peer last.
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
from repro.config.systems import LOCAL
from repro.launch.failures import classify_abort
from repro.launch.job import STOP_TIMEOUT_S, Job
from repro.launch.rank_process import Position
from repro.util import units

POLL_INTERVAL_S = 0.05
FAILURE_GRACE_S = 2.0
"""Time for which the supervisor waits for reports of other ranks after the first failure, in seconds."""
ECHO_GRACE_S = 10.0
"""Time for which the supervisor waits for other reports if ranks only report the loss of a peer, in seconds."""
START_TIMEOUT_S = 120.0
"""Minimum time without progress that counts as a hang while ranks start, in seconds; imports of torch may be slow."""
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|remote process exited|socket closed"
    r"|nccl.*(remote|aborted)|read error.*closed|connectfullmesh|wait timeout",
    re.IGNORECASE,
)
_SEVERITY = ("oom", "killed", "diverged", "error", "interrupted", "echo")


class WatchedLaunch(Protocol):
    """Interface of a launch whose ranks a supervisor (`watch`) can monitor and kill."""

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
    """End of a launch: its outcome, and the reason of the outcome."""

    outcome: str
    reason: str
    experiment: int
    """Index in the job of the experiment that ran at the end; -1 before the first experiment."""
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
    """Wait until all ranks of a launch end; kill them after a failure, a hang, a timeout or an interruption.

    `interrupted()` returns the reason of an interruption, or an empty string.  After an interruption, ranks that write
    checkpoints have `stop_s()` seconds to write one.  `tick` is called every `POLL_INTERVAL_S` with the position of
    rank 0 and the seconds of each experiment.
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
        self.last_reports = [0.0] * launch.world
        """Time at which each rank last reported its position, in seconds."""
        self.last_progress = time.monotonic()
        self.stop_requested: float | None = None
        """Time at which the ranks were requested to end; None without request, `-inf` if they write no checkpoints."""
        self.why = ""
        """Reason why the launch is interrupted; empty without an interruption."""

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
        """Request once that the ranks write a checkpoint and end; return whether to wait longer for the ranks."""
        if self.stop_requested is None:
            writes = current >= 0 and self.job.experiments[current].training.checkpoint_every
            self.stop_requested = now if writes else -math.inf
            if writes:
                self.launch.ask_to_stop()
        return now - self.stop_requested < self.stop_s()

    def _collect(self) -> int:
        """Return the number of ranks that have ended, and add each new failure to `failures`."""
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
        if -code == signal.SIGSEGV and self.job.memory_bytes and self.job.experiments[0].system == LOCAL:
            limit = units.size(self.job.memory_bytes)
            why = f"{reason}: probably the memory limit of {limit} denied an allocation of a library"
            return _Failure("oom", rank, now, why)
        if -code == signal.SIGABRT:
            severity, why = classify_abort(self.launch.error_text(rank))
            return _Failure(severity, rank, now, f"{reason}: {why[:300]}" if why else reason)
        return _Failure("killed", rank, now, reason)

    def _deadline(self) -> float:
        only_echoes = all(failure.severity == "echo" for failure in self.failures)
        return self.failures[0].seen + (ECHO_GRACE_S if only_echoes else FAILURE_GRACE_S)

    def _judge(self) -> Ending:
        # Ranks that still run are not among the failures; `watch` kills these ranks.
        first = min(self.failures, key=lambda failure: (_SEVERITY.index(failure.severity), failure.seen))
        position = self.launch.position(first.rank)
        experiment = position.experiment if position.begun else -1
        why = f"{self.why}: " if first.severity == "interrupted" and self.why else ""
        return Ending(first.outcome, why + first.reason, experiment, self.spent)

    def _overdue(self, now: float, current: int) -> Ending | None:
        limits = self.job.experiments[max(0, current)].limits
        positions = [self.launch.position(rank) for rank in self.ranks]
        reports = [position.seconds for position in positions]
        patience = limits.hang_s
        if not all(position.begun for position in positions):
            patience = max(patience, START_TIMEOUT_S)
        if reports != self.last_reports:
            self.last_reports, self.last_progress = reports, now
        if limits.timeout_s and self.spent[max(0, current)] > limits.timeout_s:
            limit = f"{limits.timeout_s:g} s (limits.timeout_s)"
            return self._end("timeout", f"the experiment did not end within {limit} {self._where_all()}")
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
            text += f"; the same applies to {len(laggards) - 4} more ranks"
        return text + (f"; {self._where(others, 'waits')}" if others else "")

    def _where_all(self) -> str:
        return f"({self._where(list(self.ranks), 'was')})"

    def _where(self, ranks: list[int], verb: str) -> str:
        """Describe the positions of `ranks` in one text that groups ranks with equal positions."""
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
        """Return the index of the experiment that rank 0 runs; -1 before the first experiment."""
        position = self.launch.position(0)
        return position.experiment if position.begun else -1

    def _end(self, outcome: str, reason: str) -> Ending:
        return Ending(outcome, reason, self._current(), self.spent)


def lagging_ranks(positions: list[Position], job: Job) -> list[int]:
    """Return the ranks for which the other ranks wait in a hang; all ranks if their positions are equal.

    Lagging ranks are in the earliest step and have issued the fewest collectives of their pipeline stage. Only ranks
    of one stage are compared, because all of them issue equal collectives.
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
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_kernel_oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed in this cgroup, or else on this machine."""
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
