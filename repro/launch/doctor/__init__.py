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
    """Whether the checked hardware, library or kernel works: `yes`, `limited` (in part) or `no`."""
    found: str
    """Detected version or device; for a failed check, the missing requirement and how to install it."""
    enables: str
    """Features that the checked item enables; after a failed check, the missing features or a remedy."""
    fatal: bool = False
    """Whether the failure of this check prevents every run of experiments."""
