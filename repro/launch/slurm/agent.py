"""One agent for each rank of an allocation: it starts the rank, says how it fares, and never dies of it.

A SLURM task is an agent, and the rank is its child: a rank that is killed, runs out of memory or hangs takes
nobody with it, and the next experiment gets a fresh process in the same allocation.  An agent does what its
controller says; without one it kills its rank and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from repro.launch import rank as rank_program
from repro.launch.beacon import Lookout
from repro.launch.job import STOP, write_json
from repro.launch.local import read_json, work_parent
from repro.launch.slurm import channel, nodes
from repro.launch.slurm.channel import BEAT_S, LOST_S, Lost, Message
from repro.launch.supervise import kernel_oom_kills

POLL_S = 0.1
ERROR_BYTES = 4000
FOLDER, LOCK = "repro-agent-", "lock"
END_S = 10.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""SLURM may send them to every process of a job, ranks included; they are for the controller to act on."""


class Agent:
    """Runs one rank after the other for its controller."""

    def __init__(self, path: Path):
        """``path``: the file that says where the controller is."""
        self.path = path
        self.rank: _Rank | None = None
        self._signals: list[int] = []

    def run(self) -> None:
        """Serve until the controller says that all is done.  Raises :class:`Lost` if it goes without a word."""
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
            self.rank = _Rank(message, self._environment(message))
            self.rank.start()
        elif rank is not None and message.get("launch") == rank.launch:
            if what == "signal":
                rank.signal(message["number"])
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


class _Rank:
    """A rank's process, its short-lived files on this node, and its logs on the shared folder."""

    def __init__(self, message: Message, environment: dict[str, str]):
        self.launch, self.number = message["launch"], message["rank"]
        self._message, self._environment = message, environment
        self._logs = Path(message["logs"])
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._lock = -1
        self._lookout: Lookout | None = None
        self._said = self._looked = 0.0
        self._stopped = self._over = False
        self._experiment = -1
        self._next = 0
        self._failure: Message | None = None
        self._oom_kills = kernel_oom_kills()

    def start(self) -> None:
        """Start it; what keeps it from starting is the first :meth:`news`."""
        try:
            self._start()
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            self._failure = {
                "code": 1,
                "errno": error.errno,
                "file": str(error.filename or self._logs),
                "report": {"rank": self.number, "outcome": "error", "reason": f"not started: {text}"},
            }

    def _start(self) -> None:
        message = self._message
        self._folder, self._lock = own_folder()
        write_json(self._folder / "job.json", message["job"])
        self._lookout = Lookout(self._folder / "beacon", message["world"])
        command = [sys.executable, "-m", rank_program.__name__, str(self._folder / "job.json")]
        command += ["--rank", str(self.number), "--device", message["device"], "--folder", str(self._folder)]
        command += ["--rendezvous", f"tcp://{message['address']}:{message['port']}"]
        command += ["--parent", str(os.getpid()), "--target", message["target"]]
        self._logs.mkdir(parents=True, exist_ok=True)
        stem = self._logs / f"rank-{self.number}"
        with open(f"{stem}.out", "wb") as out, open(f"{stem}.err", "wb") as err, _blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                start_new_session=True,
            )

    def news(self, now: float) -> Iterator[Message]:
        """What the controller does not know yet."""
        if self._over:
            return
        code = self._process.poll() if self._process is not None else 1
        if code is None:
            if now - self._looked >= BEAT_S or self._place() != self._experiment:
                yield from self._position(now)
            yield from self._results()
            return
        self._over = True
        yield from self._position(now)
        yield from self._results(last=True)
        yield self._failure_message() if self._failure else self._ended(code)

    def _place(self) -> int:
        """The experiment that the rank is in: -1 before the first."""
        assert self._lookout is not None
        position = self._lookout.position(self.number)
        return position.experiment if position.begun else -1

    def _position(self, now: float) -> Iterator[Message]:
        self._looked = now
        if self._lookout is None:
            return
        position = self._lookout.position(self.number)
        stopped = self._is_stopped()
        if position.seconds == self._said and stopped == self._stopped:
            return
        self._said, self._stopped = position.seconds, stopped
        self._experiment = position.experiment if position.begun else -1
        # Each node has its own clock: the age goes over, and the controller's clock makes a time of it.
        age = now - position.seconds if position.seconds else 0.0
        yield self._message_of("position", at=list(position), age=age, stopped=stopped)

    def _results(self, last: bool = False) -> Iterator[Message]:
        if self._folder is None:
            return
        count = len(self._message["job"]["experiments"])
        while self._next < count:
            result = read_json(rank_program.finished_file(self._folder, self._next, self.number))
            if result is not None:
                yield self._message_of("result", index=self._next, result=result)
            elif not last:
                return
            self._next += 1

    def _ended(self, code: int) -> Message:
        assert self._folder is not None
        report = read_json(rank_program.rank_file(self._folder, self.number))
        if report is None and code == -signal.SIGKILL and kernel_oom_kills() > self._oom_kills:
            reason = "killed by the kernel, which ran out of memory"
            report = {"rank": self.number, "outcome": "oom", "reason": reason}
        return self._message_of("ended", code=code, report=report, errors=self._errors())

    def _failure_message(self) -> Message:
        assert self._failure is not None
        return self._message_of("ended", **self._failure, errors="")

    def _message_of(self, what: str, **fields: Any) -> Message:
        return {"say": what, "launch": self.launch, **fields}

    def _errors(self) -> str:
        """The end of what the rank wrote to standard error."""
        try:
            with open(self._logs / f"rank-{self.number}.err", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - ERROR_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _is_stopped(self) -> bool:
        if self._process is None:
            return False
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def ask_to_stop(self) -> None:
        """Ask the rank to keep its state and to end between two steps."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # then it is killed, and goes on from its last checkpoint
                (self._folder / STOP).touch()

    def close(self) -> None:
        """Kill the rank and remove its files on this node."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
        if self._lookout is not None:
            self._lookout.close()
            self._lookout = None
        self._over = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


def own_folder() -> tuple[Path, int]:
    """A folder in this node's memory and the lock that keeps it; those of agents that were killed are removed."""
    for path in work_parent().glob(f"{FOLDER}*/{LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or in use
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=work_parent()))
    partial = folder / f"{LOCK}.partial"
    lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    partial.rename(folder / LOCK)
    return folder, lock


def free_port(address: str) -> int:
    """A port that nobody uses on ``address`` now; the launch is tried again if somebody takes it before rank 0."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(address: str) -> str:
    """Name of this node's interface that has ``address``: the one that reaches the controller; empty if none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return ""


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """What starts inside has ``SIGNALS`` blocked for life: a mask is inherited, and there is no moment without."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _noted(into: list[int]) -> Iterator[None]:
    """Signals that SLURM sends to the task only add to ``into``."""

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
    with _blocked():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def main(arguments: list[str]) -> int:
    """``python -m repro.launch.slurm.agent CHANNEL_FILE PARENT``, see :func:`beside`."""
    path, parent = arguments
    rank_program.die_with_parent(int(parent))
    try:
        Agent(Path(path)).run()
    except Lost as lost:
        print(f"agent: {lost}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
