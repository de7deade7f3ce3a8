"""A SLURM lab for tests: `slurm/lab` with a folder and a namespace prefix that no user's lab has."""

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
FOLDER = "repro-slurm-test-"  # in /tmp, because a path of a Unix socket must be short
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One line of squeue: an array element, or a complete pending array."""

    id: str
    partition: str
    state: str
    reason: str
    nodes: str


@dataclass(frozen=True)
class Lab:
    """The nodes n1, n2, ... and the login host `ctl`.

    Time-outs are in seconds. `run` uses the `repro` command of this interpreter.
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
        """Run `slurm/lab ARGUMENTS`; a failure raises an error with its output."""
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
        """Run a command on the login host."""
        return self.script("exec", *map(str, command), timeout=timeout, check=check)

    def node(self, number: int, command: Sequence[str], timeout: float = 300, check: bool = True) -> str:
        """Run a command on node n`number` and return its output."""
        return self.script("node", str(number), *command, timeout=timeout, check=check).stdout

    @contextmanager
    def background(self, where: Sequence[str], command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background; `where` is ["exec"] or ["node", I]. Kill its process group at the end."""
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
        """Limit every link, or the links of `nodes`, to a rate such as "100mbit"; "none" removes the limit."""
        for node in nodes or ("",):
            self.script("rate", rate, *([str(node)] if node else []))

    def cut(self, node: int) -> None:
        self.script("cut", str(node))

    def join(self, node: int) -> None:
        self.script("join", str(node))

    def address(self, name: str) -> str:
        """Return the IP address of node `name`."""
        hosts = Path(f"/etc/netns/{self.prefix}-ctl/hosts").read_text().splitlines()
        return next(line.split()[0] for line in hosts if line.split()[-1] == name)

    def counters(self, node: int) -> tuple[int, int]:
        """Return the bytes that the link of a node has received and sent."""
        names = [f"/sys/class/net/eth0/statistics/{direction}_bytes" for direction in ("rx", "tx")]
        received, sent = self.node(node, ["cat", *names]).split()
        return int(received), int(sent)

    def jobs(self) -> list[Job]:
        """Return the pending and running jobs, one per array element."""
        lines = self.run(["squeue", "-h", "-r", "-o", "%i|%P|%T|%r|%N"]).stdout.splitlines()
        return [Job(*line.split("|")) for line in lines]

    def nodes(self) -> set[str]:
        """Return the set of node states: "idle", "allocated", ..."""
        return set(self.run(["sinfo", "-h", "-o", "%T"]).stdout.split())

    def running(self) -> list[Job]:
        return [job for job in self.jobs() if job.state == "RUNNING"]

    def show(self, what: str, name: str) -> dict[str, str]:
        """Return the fields of `scontrol show WHAT NAME`."""
        words = self.run(["scontrol", "show", what, name, "-o"]).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, condition: Callable[[], T], timeout: float = 300, every: float = 0.25) -> T:
        """Return the first non-empty value of `condition`; after `timeout` seconds, fail with the queue's state."""
        end = time.monotonic() + timeout
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                queue = self.run(["squeue", "-r"]).stdout + self.run(["sinfo", "-N", "-l"]).stdout
                raise AssertionError(f"time-out after {timeout} s: {what}\n{queue}")
            time.sleep(every)

    def settle(self, timeout: float = 300) -> None:
        """Cancel every job and wait until all nodes are idle with their links up and unlimited."""
        self.run(["scancel", "--user=root"])
        self.wait_for("an empty queue", lambda: not self.jobs(), timeout)
        self.wait_for("idle nodes", lambda: self.nodes() == {"idle"}, timeout)


def _default_interrupt() -> None:
    """Restore SIGINT's default action: a background process of a shell ignores SIGINT, and children inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(suffix: str, **settings: str) -> Iterator[Lab]:
    """Start a lab, and shut it down at the end."""
    lab = Lab(Path(f"/tmp/{FOLDER}{os.getpid()}{suffix}"), f"t{os.getpid()}{suffix}", settings)
    lab.script("up")
    try:
        yield lab
    finally:
        lab.script("down")


def remove_abandoned() -> None:
    """Shut down labs of killed test sessions: the process in the name of their folder does not exist."""
    for folder in Path("/tmp").glob(f"{FOLDER}*"):
        process = folder.name.removeprefix(FOLDER).split("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            with suppress(OSError), _locked(folder):
                Lab(folder, "unused").script("down", check=False)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for its removal; raise `OSError` if another worker has locked or removed it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
