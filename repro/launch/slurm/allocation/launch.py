"""A launch of ranks on the nodes of a SLURM allocation, as one job step with a task per rank."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.config.enums import Phase
from repro.launch import rank_process
from repro.launch.failures import LOST_NODE
from repro.launch.job import STOP_FILE, Job
from repro.launch.local_launch import DEVICES
from repro.launch.rank_process import Position
from repro.launch.slurm.allocation import task
from repro.launch.slurm.allocation.connection import TASK_ENDED, Listener, Message
from repro.launch.slurm.allocation.srun_step import Allocation, SrunStep
from repro.launch.slurm.allocation.stop import AllocationStop
from repro.results.store import DISK_FULL

POLL_INTERVAL_S = 0.05
REAP_TIMEOUT_S = 20.0
"""Maximum time in seconds until a job step's tasks end after the controller has closed their connections."""
LOST_NODE_REAP_TIMEOUT_S = 3.0
"""Maximum time in seconds to wait for the end of a job step after the loss of a node, whose tasks never report."""
LOST_TASK_GRACE_S = 5.0
"""Time in seconds in which a SLURM signal may explain a task's unexpected end. Then the task counts as lost."""
MAX_PORT_ATTEMPTS = 3
"""Maximum number of rendezvous ports that a launch tries if other processes occupy them."""
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_NO_POSITION = Position(0, 0, Phase.START, 0, "", "", 0.0)


@dataclass
class _RankStatus:
    """State of one rank, from the messages that its SLURM task sends to the controller."""

    code: int | None = None
    report: dict[str, Any] | None = None
    errors: str = ""
    position: Position = _NO_POSITION
    reported_s: float = 0.0
    """Time of the rank's last reported training position, in seconds by the clock of the rank's node."""
    stopped: bool = False
    dumped: bool = False
    """Whether the rank has written its Python stacks to its log."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    full: str = ""
    """Path of the file that could not be written because a disk was full; empty otherwise."""
    loss_reason: str = ""
    """Reason why the connection to the rank's task ended; empty while the task is connected."""
    lost_at: float = 0.0
    """`time.monotonic()` at the end of the connection to the rank's task."""
    ended_alone: bool = False
    """Whether the rank's task ended although its node is still reachable."""


class ClusterLaunch:
    """A running job whose ranks are the tasks of one SLURM job step."""

    def __init__(
        self,
        job: Job,
        logs: Path,
        allocation: Allocation,
        nodes: list[str],
        *,
        target: str,
        stop: AllocationStop,
    ):
        """`nodes`: name of each rank's node.  The launch reports a lost node to `stop`, which ends the allocation."""
        assert len(nodes) >= job.world, "the allocation has fewer tasks than the job has ranks"
        self.job, self.world, self.logs = job, job.world, logs
        self._allocation, self._nodes, self._target, self._stop = allocation, nodes, target, stop
        self._ranks = [_RankStatus() for _ in range(self.world)]
        self._listener: Listener | None = None
        self._step: SrunStep | None = None
        self._ports = 0
        self._asked_to_stop = False
        self._loss = ""

    def start(self) -> None:
        """Start all ranks.  Raises `OSError` if the shared folder cannot store their logs."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.job.save(self.logs / task.JOB_FILE)
        self._begin()

    def _begin(self) -> None:
        """Start a job step with one task per rank, and choose a free port of this node for the rendezvous."""
        site, address = self._allocation.site, self._allocation.address
        token = secrets.token_hex(16)
        self._ports += 1
        self._ranks = [_RankStatus() for _ in range(self.world)]
        self._listener = Listener(address, token=token)
        task.TaskLaunch(
            address=address,
            port=self._listener.port,
            token=token,
            rendezvous=free_port(address),
            per_node=self._allocation.per_node,
            device=DEVICES.get(self.job.experiments[0].system, "cuda"),
            target=self._target,
            limited=bool(self.job.memory_bytes),
            interface=site.environment.interface,
            variables=site.environment.variables,
            umask=self._allocation.umask,
        ).save(self.logs)
        self._step = self._allocation.step(self.world, task.__name__, self.logs)

    # -- methods of `supervise.WatchedLaunch` ------------------------------------------------------

    def poll(self, rank: int) -> int | None:
        """Return the exit code of `rank`, negative for a signal; 1 if its task is lost; None while the rank runs."""
        if rank == 0:
            self._receive()
            if self._port_in_use():
                self.kill()
                self._begin()
        seen = self._ranks[rank]
        return 1 if seen.code is None and self._lost(rank) else seen.code

    def position(self, rank: int) -> Position:
        """Return the last reported training position of `rank`, with its time by this host's clock.

        The position is at most about one second old.
        """
        return self._ranks[rank].position

    def stopped(self, rank: int) -> bool:
        """Return whether a signal or a debugger has stopped `rank`."""
        return self._ranks[rank].stopped

    def report(self, rank: int) -> dict[str, Any] | None:
        """Return the final report of `rank`, or a report that its node or task is lost; None while neither exists."""
        seen = self._ranks[rank]
        if seen.code is None and (lost := self._lost(rank)):
            # After a stop request, SLURM may kill a task before the task reports. Such an end is no node failure.
            outcome = "interrupted" if self._asked_to_stop else "error"
            return {"rank": rank, "outcome": outcome, "reason": f"{LOST_NODE}{lost}"}
        if seen.full:
            reason = f"disk full while starting the ranks: {seen.full}"
            return {"rank": rank, "outcome": "error", "reason": reason}
        return seen.report

    def results(self, index: int) -> list[dict[str, Any]] | None:
        """Return the results of all ranks for experiment `index` of the job; None until every rank has a result."""
        self._receive()
        found = [seen.results.get(index) for seen in self._ranks]
        complete = [result for result in found if result is not None]
        return complete if len(complete) == self.world else None

    def error_text(self, rank: int) -> str:
        """Return the end of the standard error of `rank`; empty before the rank ends."""
        return self._ranks[rank].errors

    def dump_stacks(self) -> None:
        """Let all ranks write their Python stacks to their logs, and write their training positions to a file."""
        if self._step is not None:
            self._step.signal(rank_process.STACKS_SIGNAL)
        lines = [f"rank {rank} on {self._nodes[rank]}: {self.position(rank)}" for rank in range(self.world)]
        (self.logs / "positions.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        end = time.monotonic() + rank_process.STACKS_TIMEOUT_S + task.POSITION_INTERVAL_S
        while time.monotonic() < end:
            self._receive()
            if all(seen.dumped or seen.stopped or seen.code is not None for seen in self._ranks):
                return
            time.sleep(POLL_INTERVAL_S)

    def ask_to_stop(self) -> None:
        """Request that the ranks write a checkpoint after the current step and end."""
        self._asked_to_stop = True
        with contextlib.suppress(OSError):  # If this fails, ranks are killed without a last checkpoint.
            (self.logs / STOP_FILE).touch()

    def kill(self) -> None:
        """Kill the running ranks and wait until their tasks end. Ranks of a lost node may survive."""
        if self._listener is not None:
            self._receive()
            self._listener.close()
            self._listener = None
        if self._step is not None:
            self._loss = next((lost for rank in range(self.world) if (lost := self._lost(rank))), "")
            self._step.end(LOST_NODE_REAP_TIMEOUT_S if self._loss else REAP_TIMEOUT_S)
            self._step = None

    def close(self, *, keep_logs: Path | None) -> None:
        """Kill the ranks and move their logs to `keep_logs`, or remove the logs if `keep_logs` is None."""
        self.kill()
        (self.logs / task.LAUNCH_FILE).unlink(missing_ok=True)
        rank_process.move_logs(self.logs, keep_logs)
        if self._loss:
            self._stop.give_up(f"{LOST_NODE}{self._loss}")

    # -- messages from the ranks' tasks ------------------------------------------------------------

    def _lost(self, rank: int) -> str:
        """Return node and reason if the controller has lost the task of a rank that has not ended; empty otherwise."""
        seen = self._ranks[rank]
        patience = LOST_TASK_GRACE_S if seen.ended_alone else 0.0
        if seen.code is not None or not seen.loss_reason or time.monotonic() - seen.lost_at < patience:
            return ""
        return f"{self._nodes[rank]}: {seen.loss_reason}"

    def _port_in_use(self) -> bool:
        """Return whether rank 0 failed because its rendezvous port was in use, and another port may be tried."""
        first = self._ranks[0]
        has_failed = first.code not in (None, 0) and not first.position.begun
        stderr = f"{(first.report or {}).get('reason', '')} {first.errors}"
        return has_failed and self._ports < MAX_PORT_ATTEMPTS and _ADDRESS_IN_USE.search(stderr) is not None

    def _receive(self) -> None:
        """Receive the messages of all tasks, and record tasks whose connection has ended."""
        if self._listener is None or self._step is None:
            return
        now, starts = time.monotonic(), self._step.starts
        over = self._step.code is not None
        if self._step.starts != starts:  # The time until a restart of srun does not count as a hang.
            self._ranks[0].position = _NO_POSITION._replace(seconds=now)
        for rank, message in self._listener.messages():
            if rank < self.world:
                self._apply(rank, message, now)
        for rank, seen in enumerate(self._ranks):
            if seen.code is not None or seen.loss_reason:
                continue
            seen.loss_reason, seen.lost_at = self._listener.ended.get(rank, ""), now
            seen.ended_alone = seen.loss_reason == TASK_ENDED
            if over and not self._listener.has_connected(rank):
                seen.loss_reason = f"the rank's task did not start: {self._step.last_error_line()}"
                seen.ended_alone = True

    def _apply(self, rank: int, message: Message, now: float) -> None:
        seen, what = self._ranks[rank], message["say"]
        if what == "position":
            position = Position(*message["at"])
            # A task also reports an unchanged training position, which is no progress and must not get a new time.
            if position.seconds != seen.reported_s:
                seen.reported_s = position.seconds
                seen.position = position._replace(seconds=now - message["age"])
            seen.stopped = message["stopped"]
        elif what == "stacks":
            seen.dumped = True
        elif what == "signal" and message["number"] == signal.SIGTERM:
            self._stop.terminate(self._nodes[rank])
        elif what == "result":
            seen.results[message["index"]] = message["result"]
        elif what == "ended":
            seen.code, seen.report, seen.errors = message["code"], message["report"], message["errors"]
            if message.get("errno") in DISK_FULL:
                seen.full = message["file"]


def free_port(address: str) -> int:
    """Return a TCP port of `address` that is free now. Another process may take the port before rank 0 opens it."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
