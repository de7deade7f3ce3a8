"""A rank's process on its node: started, looked at and ended by the rank's task."""

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

from repro.launch import rank_process
from repro.launch.heartbeat import HeartbeatReader
from repro.launch.job import STOP_FILE, Job
from repro.launch.local_launch import read_json, scratch_parent
from repro.launch.rank import program as rank_program
from repro.launch.slurm.allocation.connection import Message
from repro.launch.slurm.allocation.stop import blocked
from repro.launch.supervise import count_kernel_oom_kills

FOLDER, LOCK, JOB = "repro-rank-", "lock", "job.json"
LOOK_S = 1.0


class RankProcess:
    """A rank's process, its short-lived files on this node, and its logs on the shared folder."""

    def __init__(self, rendezvous: str, device: str, target: str, logs: Path, rank: int, world: int):
        """`logs` holds the job too."""
        self.number, self._world, self._logs = rank, world, logs
        self._device, self._rendezvous, self._target = device, rendezvous, target
        self.code: int | None = None
        """As of the last `news`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._lock = -1
        self._heartbeats: HeartbeatReader | None = None
        self._said = self._looked = 0.0
        self._stopped = False
        self._experiment = -1
        self._experiments = 0
        self._next = 0
        self._failure: Message | None = None
        self._stacks_before: int | None = None
        """Stacks that its log had when they were asked for; None if nobody waits for them."""
        self._oom_kills = count_kernel_oom_kills()

    def start(self, environment: dict[str, str]) -> None:
        """Start it; what keeps it from starting is the first `news`."""
        try:
            self._start(environment)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
            self._failure = {
                "code": 1,
                "errno": error.errno,
                "file": str(error.filename or self._logs),
                "report": {"rank": self.number, "outcome": "error", "reason": f"not started: {text}"},
            }

    def _start(self, environment: dict[str, str]) -> None:
        self._experiments = len(Job.load(self._logs / JOB).experiments)
        self._folder, self._lock = own_folder()
        shutil.copyfile(self._logs / JOB, self._folder / JOB)
        self._heartbeats = HeartbeatReader(self._folder / "heartbeat", self._world)
        command = rank_process.rank_command(
            self._folder, self.number, device=self._device, rendezvous=self._rendezvous, target=self._target
        )
        stem = self._logs / f"rank-{self.number}"
        with open(f"{stem}.out", "wb") as out, open(f"{stem}.err", "wb") as err, blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def news(self, now: float) -> Iterator[Message]:
        """What the controller does not know yet; the last is how it ended."""
        if self._process is None:
            self.code = 1
            yield {"say": "ended", "errors": "", **(self._failure or {"code": 1, "report": None})}
            return
        code = self._process.poll()
        if code is None:
            if now - self._looked >= LOOK_S:
                self._pass_on_stop()
            if now - self._looked >= LOOK_S or self._place() != self._experiment:
                yield from self._position(now)
            yield from self._results()
            if (
                self._stacks_before is not None
                and rank_process.count_stacks(self._errors_file) > self._stacks_before
            ):
                self._stacks_before = None
                yield {"say": "stacks"}
            return
        yield from self._position(now)
        yield from self._results(last=True)
        yield self._ended(code)
        self.code = code

    def _pass_on_stop(self) -> None:
        """Ranks follow rank 0, whose task is on the controller's node and sees at once what is written there."""
        if self._folder is not None and (self._logs / STOP_FILE).exists():
            with contextlib.suppress(OSError):  # then it is killed, and goes on from its last checkpoint
                (self._folder / STOP_FILE).touch()

    def _place(self) -> int:
        """The experiment that the rank is in: -1 before the first."""
        assert self._heartbeats is not None
        position = self._heartbeats.position(self.number)
        return position.experiment if position.begun else -1

    def _position(self, now: float) -> Iterator[Message]:
        self._looked = now
        if self._heartbeats is None:
            return
        position = self._heartbeats.position(self.number)
        stopped = self._process is not None and rank_process.is_stopped(self._process.pid)
        if position.seconds == self._said and stopped == self._stopped:
            return
        self._said, self._stopped = position.seconds, stopped
        self._experiment = position.experiment if position.begun else -1
        # Each node has its own clock: the age goes over, and the controller's clock makes a time of it.
        yield {"say": "position", "at": list(position), "age": now - position.seconds, "stopped": stopped}

    def _results(self, last: bool = False) -> Iterator[Message]:
        if self._folder is None:
            return
        while self._next < self._experiments:
            result = read_json(rank_program.result_path(self._folder, self._next, self.number))
            if result is not None:
                yield {"say": "result", "index": self._next, "result": result}
            elif not last:
                return
            self._next += 1

    def _ended(self, code: int) -> Message:
        assert self._folder is not None
        report: dict[str, Any] | None = read_json(rank_program.rank_report_path(self._folder, self.number))
        if report is None and code == -signal.SIGKILL and count_kernel_oom_kills() > self._oom_kills:
            reason = "killed by the kernel, which ran out of memory"
            report = {"rank": self.number, "outcome": "oom", "reason": reason}
        errors = rank_process.read_error_log(self._logs, self.number)
        return {"say": "ended", "code": code, "report": report, "errors": errors}

    @property
    def _errors_file(self) -> Path:
        return rank_process.error_log_path(self._logs, self.number)

    def _signal(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def dump_stacks(self) -> None:
        """Have the rank write its stacks to its log; `news` says when they are there."""
        self._stacks_before = rank_process.count_stacks(self._errors_file)
        self._signal(rank_process.STACKS_SIGNAL)

    def close(self) -> None:
        """Kill the rank and remove its files on this node."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


def own_folder() -> tuple[Path, int]:
    """A folder in this node's memory and the lock that keeps it; those of tasks that were killed are removed."""
    for path in scratch_parent().glob(f"{FOLDER}*/{LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or in use
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=scratch_parent()))
    partial = folder / f"{LOCK}.partial"
    lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    partial.rename(folder / LOCK)
    return folder, lock
