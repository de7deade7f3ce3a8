"""Cores and memory of this machine, as far as this process may use them."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Logical cores that the scheduler lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_and_swap() -> int:
    """Host memory that is available now and free swap, in bytes: more than this nothing can hold."""
    import psutil

    return available_bytes() + int(psutil.swap_memory().free)


def available_bytes() -> int:
    """Host memory that is available now, in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)
