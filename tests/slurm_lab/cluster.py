"""A SLURM of its own for tests: `slurm/lab` in a folder and with a prefix that no user's lab has."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "lab"
FOLDER = "repro-slurm-test-"  # in /tmp: the sockets in it have short names or none
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One line of squeue: an array element, or a whole array that waits."""

    id: str
    partition: str
    state: str
    reason: str
    nodes: str


@dataclass(frozen=True)
class Lab:
    """Four nodes n1 to n4 and the host `ctl` on which users log in.

    Everything has a time-out in seconds. Commands of `run` find the `repro` of this interpreter first.
    """

    folder: Path
    prefix: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"LAB": str(self.folder), "PFX": self.prefix, "PATH": path, "OMP_NUM_THREADS": "1"}
        return inherited | self.settings | own

    def script(
        self, *arguments: str, timeout: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`slurm/lab ARGUMENTS`; a failure shows what it said."""
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode:
            raise AssertionError(
                f"slurm/lab {' '.join(arguments)}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def run(
        self, command: Sequence[str | Path], timeout: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command where users log in."""
        return self.script("exec", *map(str, command), timeout=timeout, check=check)

    def node(self, number: int, command: Sequence[str], timeout: float = 300, check: bool = True) -> str:
        """What a command on node n`number` prints."""
        return self.script("node", str(number), *command, timeout=timeout, check=check).stdout

    @contextmanager
    def background(self, where: Sequence[str], command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """A command beside the test, killed with its children at the end; `where`: ["exec"] or ["node", I]."""
        process = subprocess.Popen(
            [str(SCRIPT), *where, *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_default_interrupt,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=300)

    def rate(self, rate: str, *nodes: int) -> None:
        """Limit every link, or those of `nodes`: "100mbit", "none"."""
        for node in nodes or ("",):
            self.script("rate", rate, *([str(node)] if node else []))

    def cut(self, node: int) -> None:
        self.script("cut", str(node))

    def join(self, node: int) -> None:
        self.script("join", str(node))

    def address(self, name: str) -> str:
        """Of the link of the node called `name`."""
        hosts = Path(f"/etc/netns/{self.prefix}-ctl/hosts").read_text().splitlines()
        return next(line.split()[0] for line in hosts if line.split()[-1] == name)

    def counters(self, node: int) -> tuple[int, int]:
        """Bytes that the link of a node has received and sent."""
        names = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("rx", "tx")]
        received, sent = self.node(node, ["cat", *names]).split()
        return int(received), int(sent)

    def jobs(self) -> list[Job]:
        """Jobs that wait or run, one an array element."""
        lines = self.run(["squeue", "-h", "-r", "-o", "%i|%P|%T|%r|%N"]).stdout.splitlines()
        return [Job(*line.split("|")) for line in lines]

    def nodes(self) -> set[str]:
        """States that nodes are in: "idle", "allocated", ..."""
        return set(self.run(["sinfo", "-h", "-o", "%T"]).stdout.split())

    def running(self) -> list[Job]:
        return [job for job in self.jobs() if job.state == "RUNNING"]

    def show(self, what: str, name: str) -> dict[str, str]:
        """Fields of `scontrol show WHAT NAME`."""
        words = self.run(["scontrol", "show", what, name, "-o"]).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, true: Callable[[], T], timeout: float = 300, every: float = 0.25) -> T:
        """What `true` returns as soon as it is not empty; after `timeout` seconds the test fails and says why."""
        end = time.monotonic() + timeout
        while True:
            value = true()
            if value:
                return value
            if time.monotonic() > end:
                queue = self.run(["squeue", "-r"]).stdout + self.run(["sinfo", "-N", "-l"]).stdout
                raise AssertionError(f"not after {timeout} s: {what}\n{queue}")
            time.sleep(every)

    def settle(self, timeout: float = 300) -> None:
        """Cancel every job and wait until all nodes are idle with their links up and unlimited."""
        self.run(["scancel", "--user=root"])
        self.wait_for("an empty queue", lambda: not self.jobs(), timeout)
        self.wait_for("idle nodes", lambda: self.nodes() == {"idle"}, timeout)


def _default_interrupt() -> None:
    """Tests that a shell started in its background ignore SIGINT, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(suffix: str, **settings: str) -> Iterator[Lab]:
    """A lab, up; it is taken down whatever happens."""
    lab = Lab(Path(f"/tmp/{FOLDER}{os.getpid()}{suffix}"), f"t{os.getpid()}{suffix}", settings)
    lab.script("up")
    try:
        yield lab
    finally:
        lab.script("down")


def remove_abandoned() -> None:
    """Take down labs of test sessions that were killed: their folders name a process that is gone."""
    for folder in Path("/tmp").glob(f"{FOLDER}*"):
        process = folder.name.removeprefix(FOLDER).split("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            with suppress(OSError), _alone_in(folder):
                Lab(folder, "unused").script("down", check=False)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other workers from removing `folder` too.  `OSError` if one does, or has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
