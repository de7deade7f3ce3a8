"""The SLURM task of one rank: `srun` starts `python -m repro.launch.slurm.allocation.task FOLDER` once per rank.

The task runs the rank as a child process and reports the rank's state to the controller, even after the rank was
killed. When the controller closes the connection or dies, the task kills the rank and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from repro.launch import rank_process
from repro.launch.job import STOP_FILE, Job
from repro.launch.local_launch import scratch_parent
from repro.launch.rank import program as rank_program
from repro.launch.rank_process import HeartbeatReader, Position
from repro.launch.slurm.allocation.connection import Connection, Message
from repro.launch.slurm.allocation.stop import SIGNALS, signals_blocked
from repro.launch.supervise import count_kernel_oom_kills
from repro.util.files import read_json

RANK_FOLDER_PREFIX, LOCK_FILE, JOB_FILE = "repro-rank-", "lock", "job.json"
POSITION_INTERVAL_S = 1.0
LAUNCH_FILE = "launch.json"
POLL_INTERVAL_S = 0.1


class RankProcess:
    """A rank's process, its short-lived files on this node, and its logs in the shared folder."""

    def __init__(self, rendezvous: str, device: str, target: str, logs: Path, rank: int, world: int):
        """`logs`: shared folder for the rank's logs, which also contains `job.json`."""
        self.number, self._world, self._logs = rank, world, logs
        self._error_log = rank_process.error_log_path(logs, rank)
        self._device, self._rendezvous, self._target = device, rendezvous, target
        self.code: int | None = None
        """Exit code of the rank, which the method `news` sets at the rank's end; None while the rank runs."""
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
        """Number of Python stack dumps in the rank's log when another dump was requested; None without request."""
        self._oom_kills = count_kernel_oom_kills()

    def start(self, environment: dict[str, str]) -> None:
        """Start the rank's process. If the start fails, the first call of `news` reports the error."""
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
        self._experiments = len(Job.load(self._logs / JOB_FILE).experiments)
        self._folder, self._lock = claim_rank_folder()
        shutil.copyfile(self._logs / JOB_FILE, self._folder / JOB_FILE)
        self._heartbeats = HeartbeatReader(self._folder / "heartbeat", self._world)
        command = rank_process.rank_command(
            self._folder, self.number, device=self._device, rendezvous=self._rendezvous, target=self._target
        )
        with signals_blocked():
            self._process = rank_process.start_rank(command, self._logs, self.number, environment)

    def news(self, now: float) -> Iterator[Message]:
        """Yield new messages on the rank (`now`: clock in seconds) for the controller; the last one reports its end."""
        if self._process is None:
            self.code = 1
            yield {"say": "ended", "errors": "", **(self._failure or {"code": 1, "report": None})}
            return
        code = self._process.poll()
        if code is None:
            is_due = now - self._looked >= POSITION_INTERVAL_S
            if is_due:
                self._pass_on_stop()
            if is_due or self._read_position()[1] != self._experiment:
                yield from self._position(now)
            yield from self._results()
            before = self._stacks_before
            if before is not None and rank_process.count_stacks(self._error_log) > before:
                self._stacks_before = None
                yield {"say": "stacks"}
            return
        yield from self._position(now)
        yield from self._results(last=True)
        yield self._ended(code)
        self.code = code

    def _pass_on_stop(self) -> None:
        """Forward the controller's stop request to the rank. Rank 0 forwards the request to the other ranks."""
        if self._folder is not None and (self._logs / STOP_FILE).exists():
            with contextlib.suppress(OSError):  # If this fails, the rank is killed without a checkpoint.
                (self._folder / STOP_FILE).touch()

    def _read_position(self) -> tuple[Position, int]:
        """Return the rank's training position and its experiment's index in the job; -1 before the first experiment."""
        assert self._heartbeats is not None
        position = self._heartbeats.position(self.number)
        return position, position.experiment if position.begun else -1

    def _position(self, now: float) -> Iterator[Message]:
        self._looked = now
        position, experiment = self._read_position()
        stopped = self._process is not None and rank_process.is_stopped(self._process.pid)
        if position.seconds == self._said and stopped == self._stopped:
            return
        self._said, self._stopped, self._experiment = position.seconds, stopped, experiment
        # Clocks of nodes differ, so the message contains the age of the training position instead of its time.
        yield {"say": "position", "at": list(position), "age": now - position.seconds, "stopped": stopped}

    def _results(self, last: bool = False) -> Iterator[Message]:
        assert self._folder is not None
        while self._next < self._experiments:
            result = read_json(rank_program.result_path(self._folder, self._next, self.number))
            if result:
                yield {"say": "result", "index": self._next, "result": result}
            elif not last:
                return
            self._next += 1

    def _ended(self, code: int) -> Message:
        assert self._folder is not None
        report = read_json(rank_program.rank_report_path(self._folder, self.number)) or None
        if report is None and code == -signal.SIGKILL and count_kernel_oom_kills() > self._oom_kills:
            reason = "the kernel ran out of memory and killed the rank"
            report = {"rank": self.number, "outcome": "oom", "reason": reason}
        errors = rank_process.read_error_log(self._logs, self.number)
        return {"say": "ended", "code": code, "report": report, "errors": errors}

    def _signal(self, number: int) -> None:
        if self._process is not None:
            rank_process.signal_rank(self._process, number)

    def dump_stacks(self) -> None:
        """Request that the rank write its Python stacks to its log; a message of `news` reports that they are there."""
        self._stacks_before = rank_process.count_stacks(self._error_log)
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


def claim_rank_folder() -> tuple[Path, int]:
    """Create a rank's locked folder in shared memory, and remove those of killed tasks; return path and lock."""
    for path in scratch_parent().glob(f"{RANK_FOLDER_PREFIX}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):  # Skip folders that a running task locks or another user owns.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=RANK_FOLDER_PREFIX, dir=scratch_parent()))
    partial = folder / f"{LOCK_FILE}.partial"
    lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    partial.rename(folder / LOCK_FILE)
    return folder, lock


@dataclass(frozen=True, kw_only=True)
class TaskLaunch:
    """Parameters that all tasks of one launch read from a file that only the user can read."""

    address: str
    """IP address of the first node, where the controller and rank 0 run."""
    port: int
    """TCP port on which the controller accepts connections of the ranks' tasks."""
    token: str
    """Secret with which the SLURM task of a rank authenticates itself to the job's controller process."""
    rendezvous: int
    """TCP port on which rank 0 accepts the other ranks."""
    per_node: int
    device: str
    target: str
    limited: bool
    """Whether the ranks have a memory limit."""
    interface: str
    """Network interface for collectives, from the site profile; empty for the interface that reaches the controller."""
    variables: dict[str, str]
    """Environment variables that the site profile sets for every rank."""
    umask: int

    def save(self, folder: Path) -> None:
        descriptor = os.open(folder / LAUNCH_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @staticmethod
    def load(folder: Path) -> TaskLaunch:
        return TaskLaunch(**json.loads((folder / LAUNCH_FILE).read_text(encoding="utf-8")))

    def local_world(self, rank: int, world: int) -> int:
        """Return the number of ranks on the node of `rank`."""
        first = rank // self.per_node * self.per_node
        return min(self.per_node, world - first)


def task_environment(launch: TaskLaunch, rank: int, world: int, address: str) -> dict[str, str]:
    """Return a rank's environment variables; `address`: IP address of the interface that reaches the controller."""
    interface = launch.interface or interface_name(address)
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
        # glibc must return freed tensors to the kernel at once, as in `local_launch.rank_environment`.
        defaults["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)
    if "SLURM_CPUS_PER_TASK" in os.environ:
        chosen |= threads
    else:
        defaults |= threads
    if launch.interface:  # If the profile names no interface, NCCL finds the fastest interface itself.
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**defaults, **os.environ, **chosen, **launch.variables, **ours}


def interface_name(address: str) -> str:
    """Return the name of this node's network interface that has the IP address `address`; empty without a match."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return ""


def main(arguments: list[str]) -> int:
    """Run one rank and return its exit code, or 128 plus the number of the signal that killed the rank."""
    folder = Path(arguments[0])
    seen: list[int] = []
    for sort in (*SIGNALS, rank_process.STACKS_SIGNAL):
        signal.signal(sort, lambda number, frame: seen.append(number))
    launch = TaskLaunch.load(folder)
    os.umask(launch.umask)
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    try:
        connection = Connection(launch.address, launch.port, token=launch.token, rank=rank)
    except OSError as error:
        print(
            f"rank {rank}: cannot connect to the job's controller at {launch.address}: {error}",
            file=sys.stderr,
        )
        return 1
    rendezvous = f"tcp://{launch.address}:{launch.rendezvous}"
    process = RankProcess(rendezvous, launch.device, launch.target, folder, rank, world)
    with contextlib.closing(process):
        process.start(task_environment(launch, rank, world, connection.address))
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
            connection.wait(POLL_INTERVAL_S)
    return 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
