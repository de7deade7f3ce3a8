"""Memory that this process has freed, kept for what it needs next, as a device's caching allocator keeps it.

glibc gives large blocks back to the kernel and takes others at the next step, which come page by page, zeroed: 2 to
20 us for each 4 kB that is touched, up to half of what a small step computes.  It comes to one rank in one step and to
another in the next, and all others wait for that one.
"""

from __future__ import annotations

import ctypes

import torch

from repro.util.resources import available_bytes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of malloc.h, mallopt(3)."""
NEVER = 2**31 - 1
SPARE = 3
"""Times the most that a step has held: blocks come to lie elsewhere for some five steps, which take 2.4 times it."""


def keep_freed() -> None:
    """Give nothing back to the kernel from here on, where the C library has `mallopt`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_MAX, 0)


def reserve(peak: int, processes: int) -> None:
    """Have room on the heap, touched and free, for steps that hold `peak` bytes at most wherever they come to lie.

    `processes` do so at once: where memory is short, each takes its part of half of what is left.
    """
    torch.ones(min(SPARE * peak, available_bytes() // (2 * processes)), dtype=torch.uint8)
