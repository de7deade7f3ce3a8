"""One agent for each rank of an allocation: it starts the rank, says how it fares, and never dies of it.

A SLURM task is an agent, and the rank is its child: a rank that is killed, runs out of memory or hangs takes
nobody with it, and the next experiment gets a fresh process in the same allocation.  An agent does what its
controller says; without one it kills its rank and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from repro.host.processes import die_with_parent
from repro.launch.slurm import channel, nodes
from repro.launch.slurm.channel import BEAT_S, LOST_S, Lost, Message
from repro.launch.slurm.process import SIGNALS, RankProcess, blocked

POLL_S = 0.1
END_S = 10.0


class Agent:
    """Runs one rank after the other for its controller."""

    def __init__(self, path: Path):
        """`path`: the file that says where the controller is."""
        self.path = path
        self.rank: RankProcess | None = None
        self._signals: list[int] = []

    def run(self) -> None:
        """Serve until the controller says that all is done.  Raises `Lost` if it goes without a word."""
        with _noted(self._signals):
            report = nodes.report(dict(os.environ), gpus=True)
            self.link, self.welcome = channel.connect(self.path, {"report": report.message()})
            os.umask(int(self.welcome["umask"]))
            try:
                self._serve()
            finally:
                if self.rank is not None:
                    self.rank.close()
                self.link.close()

    def _serve(self) -> None:
        while True:
            for message in self.link.wait(POLL_S):
                if message["do"] == "end":
                    return
                self._do(message)
            now = time.monotonic()
            if now - self.link.heard > LOST_S:
                raise Lost(f"no word from the controller for {LOST_S:g} s")
            while self._signals:
                self._say("signal", number=self._signals.pop(0))
            if self.rank is not None:
                for news in self.rank.news(now):
                    self.link.send(news)
            if now - self.link.said > BEAT_S:
                self._say("beat")

    def _do(self, message: Message) -> None:
        what, rank = message["do"], self.rank
        if what == "port":
            self._say("port", launch=message["launch"], port=free_port(message["address"]))
        elif what == "launch":
            if rank is not None:
                rank.close()
            self.rank = RankProcess(message, self._environment(message))
            self.rank.start()
        elif rank is not None and message.get("launch") == rank.launch:
            if what == "signal":
                rank.signal(message["number"])
            elif what == "stacks":
                rank.dump_stacks()
            elif what == "stop":
                rank.ask_to_stop()
            elif what == "close":
                rank.close()
                self.rank = None

    def _say(self, what: str, **fields: Any) -> None:
        self.link.send({"say": what, **fields})

    def _environment(self, message: Message) -> dict[str, str]:
        """Of the rank: this task's own, the profile's variables, and who it is."""
        interface = self.welcome["interface"] or interface_of(self.link.address)
        variables: dict[str, str] = self.welcome["variables"]
        cores = len(os.sched_getaffinity(0))
        per_task = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) or cores // int(message["local_world"])
        ours = {
            "RANK": str(message["rank"]),
            "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": str(message["local_world"]),
            "WORLD_SIZE": str(message["world"]),
            "MASTER_ADDR": message["address"],
            "MASTER_PORT": str(message["port"]),
        }
        threads = {"OMP_NUM_THREADS": str(max(1, min(per_task, cores)))}
        defaults = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        chosen: dict[str, str] = {}
        if message["limited"]:
            defaults["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)  # as repro.launch.local.environment
        if "SLURM_CPUS_PER_TASK" in os.environ:
            chosen |= threads
        else:
            defaults |= threads
        if self.welcome["interface"]:  # else NCCL finds the fast one by itself
            chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return {**defaults, **os.environ, **chosen, **variables, **ours}


def free_port(address: str) -> int:
    """A port that nobody uses on `address` now; the launch is tried again if somebody takes it before rank 0."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(address: str) -> str:
    """Name of this node's interface that has `address`: the one that reaches the controller; empty if none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return ""


@contextlib.contextmanager
def _noted(into: list[int]) -> Iterator[None]:
    """Signals that SLURM sends to the task only add to `into`."""

    def note(number: int, frame: FrameType | None) -> None:
        into.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def beside(path: Path) -> subprocess.Popen[bytes]:
    """Start an agent as a child of the controller, which is itself the first task of its node."""
    command = [sys.executable, "-m", "repro.launch.slurm.agent", str(path), str(os.getpid())]
    with blocked():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def main(arguments: list[str]) -> int:
    """`python -m repro.launch.slurm.agent CHANNEL_FILE PARENT`, see `beside`."""
    path, parent = arguments
    die_with_parent(int(parent))
    try:
        Agent(Path(path)).run()
    except Lost as lost:
        print(f"agent: {lost}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
