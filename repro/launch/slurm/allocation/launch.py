"""A launch whose ranks are spread over the nodes of an allocation, as one job step."""

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
"""Timeout of tasks after the end of their connection, in seconds."""
LOST_NODE_REAP_TIMEOUT_S = 3.0
"""Value of `REAP_TIMEOUT_S` with a lost node, whose tasks never end, in seconds."""
LOST_TASK_GRACE_S = 5.0
"""Time after an unexplained end of a task, in seconds, in which the signal of an ending job may arrive."""
MAX_PORT_ATTEMPTS = 3
"""Maximum number of ports that a launch tries while other processes take them."""
_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_NO_POSITION = Position(0, 0, Phase.START, 0, "", "", 0.0)


@dataclass
class _RankStatus:
    """State of one rank."""

    code: int | None = None
    report: dict[str, Any] | None = None
    errors: str = ""
    position: Position = _NO_POSITION
    said: float = 0.0
    """Time of its last message by its node's clock."""
    stopped: bool = False
    dumped: bool = False
    """Whether its stacks are in its log."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    full: str = ""
    """File that did not fit on the disk of its node."""
    loss_reason: str = ""
    """Reason of the task's loss; empty while it is connected."""
    lost_at: float = 0.0
    ended_alone: bool = False
    """Whether its task has ended on a node that answers."""


class ClusterLaunch:
    """A running job: one step with one task per rank."""

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
        """`nodes`: node of every rank.  `stop` is notified of a lost node, after which no other launch is possible."""
        assert len(nodes) >= job.world, "fewer places than ranks"
        self.job, self.world, self.logs = job, job.world, logs
        self._allocation, self._nodes, self._target, self._stop = allocation, nodes, target, stop
        self._ranks = [_RankStatus() for _ in range(self.world)]
        self._listener: Listener | None = None
        self._step: SrunStep | None = None
        self._ports = 0
        self._asked_to_stop = False
        self._loss = ""

    def start(self) -> None:
        """Start all ranks.  Raises `OSError` if their logs do not fit on the shared folder."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.job.save(self.logs / task.JOB_FILE)
        self._begin()

    def _begin(self) -> None:
        """Start a step with new ranks and a free port of this node for rank 0."""
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

    # -- interface of supervise --------------------------------------------------------------------

    def poll(self, rank: int) -> int | None:
        """Return the exit code of `rank`, negative for a signal; 1 if its task is lost; None while it runs."""
        if rank == 0:
            self._look()
            if self._taken():
                self.kill()
                self._begin()
        seen = self._ranks[rank]
        return 1 if seen.code is None and self._lost(rank) else seen.code

    def position(self, rank: int) -> Position:
        """Return the last reported position of `rank`, about a second old or newer, in the time of this host."""
        return self._ranks[rank].position

    def stopped(self, rank: int) -> bool:
        """Return whether a signal or a debugger has stopped `rank`."""
        return self._ranks[rank].stopped

    def report(self, rank: int) -> dict[str, Any] | None:
        """Return the report of the end of `rank`, or of the loss of its node."""
        seen = self._ranks[rank]
        if seen.code is None and (lost := self._lost(rank)):
            # After a stop request, SLURM may end the rank before the rank ends: this is no failure of a node.
            outcome = "interrupted" if self._asked_to_stop else "error"
            return {"rank": rank, "outcome": outcome, "reason": f"{LOST_NODE}{lost}"}
        if seen.full:
            reason = f"disk full while starting the ranks: {seen.full}"
            return {"rank": rank, "outcome": "error", "reason": reason}
        return seen.report

    def results(self, index: int) -> list[dict[str, Any]] | None:
        """Return all ranks' results of the job's experiment `index`; None unless every rank finished it."""
        self._look()
        found = [seen.results.get(index) for seen in self._ranks]
        complete = [result for result in found if result is not None]
        return complete if len(complete) == self.world else None

    def error_text(self, rank: int) -> str:
        """Return the end of the standard error of `rank`, once it has ended."""
        return self._ranks[rank].errors

    def dump_stacks(self) -> None:
        """Request the stacks of every rank in its log and wait for them; write all positions to `positions.txt`."""
        if self._step is not None:
            self._step.signal(rank_process.STACKS_SIGNAL)
        lines = [f"rank {rank} on {self._nodes[rank]}: {self.position(rank)}" for rank in range(self.world)]
        (self.logs / "positions.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        end = time.monotonic() + rank_process.STACKS_TIMEOUT_S + task.POSITION_INTERVAL_S
        while time.monotonic() < end:
            self._look()
            if all(seen.dumped or seen.stopped or seen.code is not None for seen in self._ranks):
                return
            time.sleep(POLL_INTERVAL_S)

    def ask_to_stop(self) -> None:
        """Request a checkpoint after the current step, and the end of the ranks."""
        self._asked_to_stop = True
        with contextlib.suppress(OSError):  # they are then killed, and resume from their last checkpoint
            (self.logs / STOP_FILE).touch()

    def kill(self) -> None:
        """Kill the running ranks and wait for their end; ranks of a lost node may remain."""
        if self._listener is not None:
            self._look()
            self._listener.close()
            self._listener = None
        if self._step is not None:
            self._loss = next((lost for rank in range(self.world) if (lost := self._lost(rank))), "")
            self._step.end(LOST_NODE_REAP_TIMEOUT_S if self._loss else REAP_TIMEOUT_S)
            self._step = None

    def close(self, *, keep_logs: Path | None) -> None:
        """End the launch; after a failure, move the logs to `keep_logs`."""
        self.kill()
        (self.logs / task.LAUNCH_FILE).unlink(missing_ok=True)
        rank_process.move_logs(self.logs, keep_logs)
        if self._loss:
            self._stop.give_up(f"{LOST_NODE}{self._loss}")

    # -- the tasks ---------------------------------------------------------------------------------

    def _lost(self, rank: int) -> str:
        """Return the loss of the task of a rank that has not ended, with its node; empty while it is connected."""
        seen = self._ranks[rank]
        patience = LOST_TASK_GRACE_S if seen.ended_alone else 0.0
        if seen.code is not None or not seen.loss_reason or time.monotonic() - seen.lost_at < patience:
            return ""
        return f"{self._nodes[rank]}: {seen.loss_reason}"

    def _taken(self) -> bool:
        """Return whether rank 0 found its port in use and another port may be tried."""
        first = self._ranks[0]
        has_failed = first.code not in (None, 0) and not first.position.begun
        stderr = f"{(first.report or {}).get('reason', '')} {first.errors}"
        return has_failed and self._ports < MAX_PORT_ATTEMPTS and _TAKEN.search(stderr) is not None

    def _look(self) -> None:
        """Read the messages of the tasks, and record lost tasks."""
        if self._listener is None or self._step is None:
            return
        now, starts = time.monotonic(), self._step.starts
        over = self._step.code is not None
        if self._step.starts != starts:  # a restart of srun is no hang of the ranks
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
                seen.loss_reason = f"its task did not start: {self._step.last_error_line()}"
                seen.ended_alone = True

    def _apply(self, rank: int, message: Message, now: float) -> None:
        seen, what = self._ranks[rank], message["say"]
        if what == "position":
            position = Position(*message["at"])
            # A repeated report keeps its time: only a new one is progress.
            if position.seconds != seen.said:
                seen.said = position.seconds
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
    """Return a free port of `address`; the launch is repeated if another process takes the port before rank 0."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
