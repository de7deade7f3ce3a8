"""The task of one rank, which srun starts: it runs the rank as its child, says how it fares, never dies of it.

`python -m repro.launch.slurm.allocation.task FOLDER`.  A rank that is killed, runs out of memory or is stopped can say
nothing; its task does.  When the controller closes the connection, or is gone, the task kills the rank and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from repro.launch import rank_process
from repro.launch.slurm.allocation.connection import Connection
from repro.launch.slurm.allocation.rank_child import RankProcess
from repro.launch.slurm.allocation.stop import SIGNALS

FILE = "launch.json"
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class TaskLaunch:
    """What the tasks of one launch are told, in a file that only the user can read."""

    address: str
    """Of the first node."""
    port: int
    """At which the controller listens."""
    token: str
    rendezvous: int
    """The port at which rank 0 is to listen."""
    per_node: int
    device: str
    target: str
    limited: bool
    """Whether the ranks have a memory limit."""
    interface: str
    """By the profile; empty: the one that reaches the controller."""
    variables: dict[str, str]
    umask: int

    def save(self, folder: Path) -> None:
        """Write it to `folder`."""
        descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @staticmethod
    def load(folder: Path) -> TaskLaunch:
        """What `save` wrote."""
        return TaskLaunch(**json.loads((folder / FILE).read_text(encoding="utf-8")))

    def local_world(self, rank: int, world: int) -> int:
        """Ranks on the node of `rank`."""
        first = rank // self.per_node * self.per_node
        return min(self.per_node, world - first)


def environment(launch: TaskLaunch, rank: int, world: int, address: str) -> dict[str, str]:
    """Of the rank: this task's own, the profile's variables, and who it is.  `address`: of this node."""
    interface = launch.interface or interface_of(address)
    local_world = launch.local_world(rank, world)
    cores = len(os.sched_getaffinity(0))
    per_task = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) or cores // local_world
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(local_world),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": str(launch.rendezvous),
    }
    threads = {"OMP_NUM_THREADS": str(max(1, min(per_task, cores)))}
    defaults = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    chosen: dict[str, str] = {}
    if launch.limited:
        defaults["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)  # as repro.launch.local_launch.rank_environment
    if "SLURM_CPUS_PER_TASK" in os.environ:
        chosen |= threads
    else:
        defaults |= threads
    if launch.interface:  # else NCCL finds the fast one by itself
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**defaults, **os.environ, **chosen, **launch.variables, **ours}


def interface_of(address: str) -> str:
    """Name of this node's interface that has `address`; empty if none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return ""


def main(arguments: list[str]) -> int:
    """Run one rank to its end; the exit code is the rank's as a shell would give it."""
    folder = Path(arguments[0])
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    for sort in (*SIGNALS, rank_process.STACKS_SIGNAL):
        signal.signal(sort, note)
    launch = TaskLaunch.load(folder)
    os.umask(launch.umask)
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    try:
        connection = Connection(launch.address, launch.port, token=launch.token, rank=rank)
    except OSError as error:
        print(f"rank {rank}: no controller at {launch.address}: {error}", file=sys.stderr)
        return 1
    rendezvous = f"tcp://{launch.address}:{launch.rendezvous}"
    process = RankProcess(rendezvous, launch.device, launch.target, folder, rank, world)
    with contextlib.closing(process):
        process.start(environment(launch, rank, world, connection.address))
        while connection.open:
            for news in process.news(time.monotonic()):
                connection.send(news)
            if process.code is not None:
                return process.code if process.code >= 0 else 128 - process.code
            while seen:
                number = seen.pop(0)
                if number == rank_process.STACKS_SIGNAL:
                    process.dump_stacks()
                else:
                    connection.send({"say": "signal", "number": int(number)})
            connection.wait(POLL_S)
    return 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
