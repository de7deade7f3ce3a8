"""Processes of ranks as their launcher sees them: command line, state, error log and Python stacks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

MAX_ERROR_LOG_BYTES = 16_000
"""Bytes that are read from the end of an error log. After an abort, stacks follow the message."""


def rank_command(folder: Path, rank: int, *, device: str, rendezvous: str, target: str) -> list[str]:
    """Return the command line of `rank` of the job in `folder/job.json`. The rank ends with this process."""
    return [
        *(sys.executable, "-m", "repro.launch.rank.program", str(folder / "job.json")),
        *("--rank", str(rank), "--device", device, "--folder", str(folder)),
        *("--rendezvous", rendezvous, "--parent", str(os.getpid()), "--target", target),
    ]


def process_state(pid: int) -> str:
    """Return the kernel's state letter of a process, `T` if stopped; empty for a missing process or a zombie.

    In a container without an init process, an ended orphan remains as a zombie.
    """
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in ("Z", "X") else found


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    return process_state(pid) in ("T", "t")


def error_log_path(logs: Path, rank: int) -> Path:
    """Return the path of the standard error of `rank`, which includes its stacks."""
    return logs / f"rank-{rank}.err"


def read_error_log(logs: Path, rank: int) -> str:
    """Return the end of the standard error of `rank`."""
    try:
        with open(error_log_path(logs, rank), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_ERROR_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


STACKS_SIGNAL = signal.SIGUSR1
"""Python's faulthandler writes the stacks in the signal handler, so that a rank inside a collective writes them too."""
STACKS_TIMEOUT_S = 5.0
"""Timeout of a rank that writes its stacks, in seconds."""
_STACK_HEADER = b"(most recent call first)"


def count_stacks(log: Path) -> int:
    """Return the number of thread stacks in a rank's standard error."""
    try:
        return log.read_bytes().count(_STACK_HEADER)
    except OSError:
        return 0
