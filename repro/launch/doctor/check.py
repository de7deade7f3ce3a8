"""What `repro doctor` answers, of a machine or of a SLURM profile: a line for each thing that was looked for."""

from __future__ import annotations

from dataclasses import dataclass

YES, LIMITED, NO = "yes", "limited", "no"


@dataclass(frozen=True)
class Check:
    """One line: what was looked for, whether it is here, and what that means."""

    name: str
    state: str
    """`yes`, `limited` or `no`."""
    found: str
    """What was found, or what is missing and how to get it."""
    enables: str
    """What works with it, or what stays undone without it."""
    fatal: bool = False
    """Nothing can be run while this is so."""
