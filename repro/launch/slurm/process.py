"""A rank's process on its node: started, looked at and ended by the node's agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro.host.files import write_json
from repro.launch import processes, stacks
from repro.launch import rank as rank_program
from repro.launch.beacon import Lookout
from repro.launch.job import STOP
from repro.launch.local import read_json, work_parent
from repro.launch.slurm.channel import BEAT_S, Message
from repro.launch.supervise import kernel_oom_kills

FOLDER, LOCK = "repro-agent-", "lock"
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""SLURM may send them to every process of a job, ranks included; they are for the controller to act on."""


class RankProcess:
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
        self._stacks_before: int | None = None
        """Stacks that its log had when they were asked for; None if nobody waits for them."""
        self._oom_kills = kernel_oom_kills()

    def start(self) -> None:
        """Start it; what keeps it from starting is the first `news`."""
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
        command = processes.command(
            self._folder,
            self.number,
            device=message["device"],
            rendezvous=f"tcp://{message['address']}:{message['port']}",
            target=message["target"],
        )
        self._logs.mkdir(parents=True, exist_ok=True)
        stem = self._logs / f"rank-{self.number}"
        with open(f"{stem}.out", "wb") as out, open(f"{stem}.err", "wb") as err, blocked():
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
            if self._stacks_before is not None and stacks.count(self._errors_file) > self._stacks_before:
                self._stacks_before = None
                yield self._message_of("stacks")
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
        stopped = self._process is not None and processes.is_stopped(self._process.pid)
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
        return self._message_of(
            "ended", code=code, report=report, errors=processes.errors(self._logs, self.number)
        )

    def _failure_message(self) -> Message:
        assert self._failure is not None
        return self._message_of("ended", **self._failure, errors="")

    def _message_of(self, what: str, **fields: Any) -> Message:
        return {"say": what, "launch": self.launch, **fields}

    @property
    def _errors_file(self) -> Path:
        return processes.errors_file(self._logs, self.number)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def dump_stacks(self) -> None:
        """Have the rank write its stacks to its log; `news` says when they are there."""
        self._stacks_before = stacks.count(self._errors_file)
        self.signal(stacks.SIGNAL)

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


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """What starts inside has `SIGNALS` blocked for life: a mask is inherited, and there is no moment without."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
