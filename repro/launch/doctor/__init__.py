"""Checks of a machine for `repro doctor`: hardware, drivers, libraries, CUDA kernels, and the features they enable.

`machine` and `kernels` return lists of `Check`. `launch.slurm.submission` adds checks of a SLURM cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

YES, LIMITED, NO = "yes", "limited", "no"


@dataclass(frozen=True)
class Check:
    """Result of one check of a machine or of a SLURM profile."""

    name: str
    state: str
    """`yes`, `limited` or `no`."""
    found: str
    """Detected version or device, or the missing requirement and its installation."""
    enables: str
    """Features that the checked item enables, or that are disabled without it."""
    fatal: bool = False
    """Whether no run is possible in this state."""
