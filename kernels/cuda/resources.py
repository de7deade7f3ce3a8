"""What the assembler says of a program: registers, shared memory, and what did not fit and is spilled."""

from __future__ import annotations

import re
from typing import NamedTuple


class Resources(NamedTuple):
    """Of one kernel."""

    registers: int
    """32-bit ones, of a thread."""
    stack_bytes: int
    spilled_bytes: int
    """Stores and loads of spilled registers, of a thread."""
    shared_bytes: int
    """Of a block, known at compile time."""


def resources(log: str) -> dict[str, Resources]:
    """Kernel -> its resources, from the log of a compilation with `--ptxas-options=-v`."""
    found: dict[str, Resources] = {}
    name, stack, spilled = "", 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spilled = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Resources(int(used[1]), stack, spilled, int(shared[1]) if shared else 0)
    return found
