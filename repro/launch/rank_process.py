"""Functions of a launcher for the processes of ranks: command line, state, error log, Python stacks and heartbeats.

A heartbeat is a file in shared memory with the last position of every rank. It survives a killed rank, and a rank
writes its own part without a lock, in about a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from repro.config.enums import Phase

MAX_ERROR_LOG_BYTES = 16_000
"""Maximum number of bytes that are read from the end of an error log, enough for the stacks after an error message."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal upon which `faulthandler` writes the Python stacks of a rank, even while the rank waits in a collective."""
STACKS_TIMEOUT_S = 5.0
"""Time in which ranks must have written their Python stacks, in seconds."""
_STACK_HEADER = b"(most recent call first)"
_PHASES = tuple(Phase)
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_PHASE = struct.Struct("=iiqd")
"""Binary layout of a phase in the heartbeat file: experiment index, phase number, step, and time in seconds."""
_COLLECTIVE = struct.Struct("=qd24s24s")
"""Binary layout of a collective in the heartbeat file: sequence number, time in seconds, operation and group."""
_SLOT_BYTES = 128


def rank_command(folder: Path, rank: int, *, device: str, rendezvous: str, target: str) -> list[str]:
    """Return the command that starts `rank` of the job in `folder/job.json`. The rank dies if this process dies."""
    return [
        *(sys.executable, "-m", "repro.launch.rank.program", str(folder / "job.json")),
        *("--rank", str(rank), "--device", device, "--folder", str(folder)),
        *("--rendezvous", rendezvous, "--parent", str(os.getpid()), "--target", target),
    ]


def process_state(pid: int) -> str:
    """Return the state letter of a process in `/proc`, `T` if stopped; empty for a missing process or a zombie."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in ("Z", "X") else found


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    return process_state(pid) in ("T", "t")


def start_rank(
    command: list[str], logs: Path, rank: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of a rank in a new session, so that Ctrl-C in the terminal does not reach the rank."""
    with open(logs / f"rank-{rank}.out", "wb") as out, open(error_log_path(logs, rank), "wb") as err:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )


def signal_rank(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and its children, unless the rank has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def move_logs(logs: Path, target: Path | None) -> None:
    """Move the logs of an ended launch to the folder `target`; if `target` is None, remove the logs."""
    if target != logs and logs.exists():
        shutil.rmtree(target or logs, ignore_errors=True)
        if target is not None:
            logs.rename(target)


def error_log_path(logs: Path, rank: int) -> Path:
    """Return the path of the file with the standard error and the Python stacks of `rank`."""
    return logs / f"rank-{rank}.err"


def read_error_log(logs: Path, rank: int) -> str:
    """Return the last `MAX_ERROR_LOG_BYTES` of the standard error of `rank`; empty without a file."""
    try:
        with open(error_log_path(logs, rank), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_ERROR_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def count_stacks(log: Path) -> int:
    """Return the number of thread stacks in the error log `log` of a rank."""
    try:
        return log.read_bytes().count(_STACK_HEADER)
    except OSError:
        return 0


class Position(NamedTuple):
    """Last position that a rank has reported: its experiment, step, phase and collective."""

    experiment: int
    step: int
    phase: Phase
    sequence: int
    """Sequence number of the rank's last collective, which is the number of collectives that the rank has issued."""
    op: str
    group: str
    seconds: float
    """Time at which the rank reported the position (`time.monotonic()`), in seconds; 0.0 before the first report."""

    @property
    def begun(self) -> bool:
        """Return whether the rank has entered an experiment."""
        return self.phase != Phase.START

    def __str__(self) -> str:
        if not self.begun:
            return "at start-up"
        place = f"at step {self.step}, {self.phase}"
        collective = f"after collective {self.op} #{self.sequence} in group {self.group}"
        return f"{place}, {collective}" if self.op else place


class HeartbeatWriter:
    """Writer of one rank's part of the heartbeat file, called at every phase and every collective."""

    def __init__(self, path: Path, rank: int, keep: Callable[[int, dict[str, Any]], None] | None = None):
        self._map = _map_file(path)
        self._phase_at = rank * _SLOT_BYTES
        self._collective_at = rank * _SLOT_BYTES + _PHASE.size
        self._keep = keep

    def phase(self, experiment_index: int, step: int, phase: Phase) -> None:
        """Report that the rank enters `phase` of `step` in the experiment with this index in the job."""
        number = _PHASE_NUMBERS[phase]
        _PHASE.pack_into(self._map, self._phase_at, experiment_index, number, step, time.monotonic())

    def collective(self, sequence: int, op: str, group: str, purpose: str = "") -> None:
        """Report that the rank issues a collective: its number `sequence`, operation `op` and process group `group`."""
        _COLLECTIVE.pack_into(
            self._map, self._collective_at, sequence, time.monotonic(), op.encode(), group.encode()
        )

    def finished(self, experiment_index: int, result: dict[str, Any]) -> None:
        """Store the rank's result of one experiment, so that the failure of a later experiment cannot lose it."""
        if self._keep is not None:
            self._keep(experiment_index, result)


class HeartbeatReader:
    """Reader of the heartbeat file of one launch. The constructor creates the file."""

    def __init__(self, path: Path, world: int):
        with open(path, "wb") as file:
            file.truncate(world * _SLOT_BYTES)
        self._map = _map_file(path)

    def position(self, rank: int) -> Position:
        """Return the last position (experiment, step, phase, collective) that `rank` has reported."""
        experiment, number, step, began = _PHASE.unpack_from(self._map, rank * _SLOT_BYTES)
        sequence, issued, op, group = _COLLECTIVE.unpack_from(self._map, rank * _SLOT_BYTES + _PHASE.size)
        op, group = (name.rstrip(b"\0").decode() for name in (op, group))
        return Position(experiment, step, _PHASES[number], sequence, op, group, max(began, issued))

    def close(self) -> None:
        self._map.close()


def _map_file(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
