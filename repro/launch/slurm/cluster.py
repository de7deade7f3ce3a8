"""A launch whose ranks are spread over the nodes of an allocation; `repro.launch.supervise` watches it as any."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.config.enums import Phase
from repro.launch import stacks
from repro.launch.beacon import Position
from repro.launch.failures import LOST_NODE
from repro.launch.job import Job
from repro.launch.local import DEVICES, read_json
from repro.launch.slurm import channel
from repro.launch.slurm.channel import Message
from repro.launch.slurm.crew import Crew
from repro.launch.slurm.nodes import Report
from repro.results.store import DISK_FULL

PORT_S = 30.0
REAP_S = 20.0
PORTS = 3
"""How many ports are tried before a launch fails because others take them."""
_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_NOWHERE = Position(0, 0, Phase.START, 0, "", "", 0.0)


@dataclass
class _Seen:
    """What is known of one rank."""

    code: int | None = None
    report: dict[str, Any] | None = None
    errors: str = ""
    position: Position = _NOWHERE
    said: float = 0.0
    """Time of its last word by its node's clock."""
    stopped: bool = False
    dumped: bool = False
    """Whether its stacks are in its log."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    full: str = ""
    """The file for which its node had no room."""


class ClusterLaunch:
    """A running job, one rank for each of the first `job.world` agents."""

    _count = 0

    def __init__(self, job: Job, logs: Path, crew: Crew, *, target: str, on_loss: Callable[[str], None]):
        """`on_loss` is told at the end if an agent is gone: then there cannot be another launch."""
        self._on_loss = on_loss
        self.job, self.world, self.logs = job, job.world, logs
        self._crew, self._target = crew, target
        self._agents: list[Report] = crew.reports()[: self.world]
        self._rank_of = {agent.task: rank for rank, agent in enumerate(self._agents)}
        self._ranks = [_Seen() for _ in self._agents]
        self._id, self._port, self._ports = 0, 0, 0
        assert len(self._agents) == self.world, "fewer agents than ranks"

    def start(self) -> None:
        """Start all ranks.  Raises `OSError` if the shared folder has no room for their logs."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.job.save(self.logs / "job.json")
        self._begin()

    def _begin(self) -> None:
        """Fresh ranks, and for them a port that is free on the node of rank 0."""
        ClusterLaunch._count += 1
        self._id, self._port = ClusterLaunch._count, 0
        self._ports += 1
        self._ranks = [_Seen() for _ in self._agents]
        self._say(0, "port", address=self._crew.address)
        self._wait_for(lambda: bool(self._port or self._lost(0)), PORT_S)
        if not self._port and not self._lost(0):
            reason = f"the agent on {self._agents[0].node} named no port within {PORT_S:g} s"
            report = {"rank": 0, "outcome": "error", "reason": reason}
            self._ranks = [_Seen(code=1, report=report) for _ in self._agents]
            return
        nodes = [agent.node for agent in self._agents]
        document = read_json(self.logs / "job.json")
        for rank, agent in enumerate(self._agents):
            self._say(
                rank,
                "launch",
                job=document,
                rank=rank,
                world=self.world,
                local_world=nodes.count(agent.node),
                device=DEVICES.get(self.job.experiments[0].system, "cuda"),
                address=self._crew.address,
                port=self._port,
                logs=str(self.logs),
                target=self._target,
                limited=bool(self.job.memory_bytes),
            )

    # -- what supervise asks -----------------------------------------------------------------------

    def poll(self, rank: int) -> int | None:
        """Exit code of `rank`, negative for a signal; 1 if its agent is lost; None while it runs."""
        if rank == 0:
            self._pump()
            if self._taken():
                self.kill()
                self._begin()
        seen = self._ranks[rank]
        return 1 if seen.code is None and self._lost(rank) else seen.code

    def position(self, rank: int) -> Position:
        """Where `rank` was when its agent looked last, about a second ago at most; times are this host's."""
        return self._ranks[rank].position

    def stopped(self, rank: int) -> bool:
        """Whether `rank` is stopped by a signal or a debugger."""
        return self._ranks[rank].stopped

    def report(self, rank: int) -> dict[str, Any] | None:
        """How `rank` says it ended, or that its node is lost."""
        seen = self._ranks[rank]
        if seen.code is None and (lost := self._lost(rank)):
            return {"rank": rank, "outcome": "error", "reason": f"{LOST_NODE}{lost}"}
        if seen.full:
            reason = f"disk full while starting the ranks: {seen.full}"
            return {"rank": rank, "outcome": "error", "reason": reason}
        return seen.report

    def results(self, index: int) -> list[dict[str, Any]] | None:
        """All ranks' results of the job's experiment `index`; None unless every rank finished it."""
        self._pump()
        found = [seen.results.get(index) for seen in self._ranks]
        complete = [result for result in found if result is not None]
        return complete if len(complete) == self.world else None

    def error_text(self, rank: int) -> str:
        """The end of what `rank` wrote to standard error, once it has ended."""
        return self._ranks[rank].errors

    def dump_stacks(self) -> None:
        """Have every rank write its Python stacks to its log, and hear of it; where all of them are goes beside."""
        for rank in range(self.world):
            self._say(rank, "stacks")
        lines = [f"rank {r} on {a.node}: {self.position(r)}" for r, a in enumerate(self._agents)]
        (self.logs / "positions.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        seen = list(enumerate(self._ranks))
        self._wait_for(
            lambda: all(s.dumped or s.stopped or self.poll_quietly(rank) is not None for rank, s in seen),
            stacks.WAIT_S + channel.BEAT_S,
        )

    def ask_to_stop(self) -> None:
        """Have the ranks write a checkpoint after the step that they are in, and end."""
        for rank in range(self.world):
            self._say(rank, "stop")

    def kill(self) -> None:
        """Kill what still runs and wait until it has ended, or until its agent is lost."""
        running = [rank for rank, seen in enumerate(self._ranks) if seen.code is None]
        for rank in running:
            self._say(rank, "signal", number=int(signal.SIGKILL))
        self._wait_for(lambda: all(self.poll_quietly(rank) is not None for rank in running), REAP_S)

    def poll_quietly(self, rank: int) -> int | None:
        """As `poll`, without starting again what found its port taken."""
        return 1 if self._ranks[rank].code is None and self._lost(rank) else self._ranks[rank].code

    def close(self, *, keep_logs: Path | None) -> None:
        """Have the agents remove their files; the logs move to `keep_logs` where something failed."""
        self.kill()
        for rank in range(self.world):
            self._say(rank, "close")
        if keep_logs is None:
            shutil.rmtree(self.logs, ignore_errors=True)
        elif keep_logs != self.logs and self.logs.exists():
            shutil.rmtree(keep_logs, ignore_errors=True)
            self.logs.rename(keep_logs)
        if lost := self._crew.losses():
            self._on_loss(f"{LOST_NODE}{lost}")

    # -- the agents --------------------------------------------------------------------------------

    def _say(self, to: int, what: str, **fields: Any) -> None:
        self._crew.send(self._agents[to].task, {"do": what, "launch": self._id, **fields})

    def _lost(self, rank: int) -> str:
        return self._crew.lost(self._agents[rank].task)

    def _taken(self) -> bool:
        """Whether rank 0 found its port in use, and another may be tried."""
        first = self._ranks[0]
        said = f"{(first.report or {}).get('reason', '')} {first.errors}"
        return (
            first.code not in (None, 0)
            and not first.position.begun
            and self._ports < PORTS
            and _TAKEN.search(said) is not None
        )

    def _wait_for(self, what: Callable[[], bool], seconds: float) -> None:
        """Take in what the agents say until `what()` holds or time is up."""

        def look() -> bool:
            self._pump()
            return what()

        self._crew.wait_for(look, seconds)

    def _pump(self) -> None:
        now = time.monotonic()
        for task, message in self._crew.messages():
            if message.get("launch") == self._id and task in self._rank_of:
                self._apply(self._rank_of[task], message, now)

    def _apply(self, rank: int, message: Message, now: float) -> None:
        seen, what = self._ranks[rank], message["say"]
        if what == "port":
            self._port = message["port"]
        elif what == "position":
            position = Position(*message["at"])
            # A word that was heard before keeps its time: only a new one is progress.
            if position.seconds != seen.said:
                seen.said = position.seconds
                seen.position = position._replace(seconds=now - message["age"])
            seen.stopped = message["stopped"]
        elif what == "stacks":
            seen.dumped = True
        elif what == "result":
            seen.results[message["index"]] = message["result"]
        elif what == "ended":
            seen.code, seen.report, seen.errors = message["code"], message["report"], message["errors"]
            if message.get("errno") in DISK_FULL:
                seen.full = message["file"]


class ClusterLauncher:
    """Starts jobs in one allocation.  Nothing else runs there, and a case is submitted once: no locks."""

    def __init__(self, logs: Path, crew: Crew, target: str, on_loss: Callable[[str], None]):
        self.logs, self._crew, self._target, self._on_loss = logs, crew, target, on_loss

    def take(self, keys: list[str]) -> bool:
        """Always."""
        return True

    def release(self) -> None:
        """Nothing to do."""

    def launch(self, job: Job, logs: Path) -> ClusterLaunch:
        """A launch on the first agents."""
        return ClusterLaunch(job, logs, self._crew, target=self._target, on_loss=self._on_loss)
