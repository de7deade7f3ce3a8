"""Processes of ranks, as whoever starts them sees them: the command, the state, the end of what they wrote."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from repro.launch.rank import program as rank_program

ERROR_BYTES = 16_000
"""After an abort the stacks of C++ and of all threads follow what was said."""


def command(folder: Path, rank: int, *, device: str, rendezvous: str, target: str) -> list[str]:
    """What starts `rank` of the job in `folder/job.json`, as a child that ends with this process."""
    return [
        *(sys.executable, "-m", rank_program.__name__, str(folder / "job.json")),
        *("--rank", str(rank), "--device", device, "--folder", str(folder)),
        *("--rendezvous", rendezvous, "--parent", str(os.getpid()), "--target", target),
    ]


def state(pid: int) -> str:
    """The kernel's letter for what a process does, `T` if it is stopped; empty if there is none, or a zombie.

    Where nobody collects orphans (containers without an init) one that has ended stays as a zombie.
    """
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in ("Z", "X") else found


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped it."""
    return state(pid) in ("T", "t")


def errors_file(logs: Path, rank: int) -> Path:
    """Where `rank` writes standard error, its stacks included."""
    return logs / f"rank-{rank}.err"


def errors(logs: Path, rank: int) -> str:
    """The end of what `rank` wrote to standard error."""
    try:
        with open(errors_file(logs, rank), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - ERROR_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
