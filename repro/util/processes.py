"""The running process: its end with its parent, usable cores and memory, core affinity, heap and garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`, from malloc.h."""
_NEVER_TRIM = 2**31 - 1
HEAP_PEAKS = 3
"""Reserved heap as a multiple of a step's peak.  In the first five steps, blocks move within 2.4 times the peak."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` dies, even of SIGKILL; without effect outside Linux.

    `parent` 0 means no parent.  Raises `OSError` if the kernel refuses.
    """
    if not parent or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def usable_cores() -> int:
    """Return the number of logical cores that the scheduler lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the available host memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def memory_and_swap() -> int:
    """Return the sum of available host memory and free swap in bytes, an upper bound of any allocation."""
    import psutil

    return available_bytes() + int(psutil.swap_memory().free)


def count_compute_cores(cores: int) -> int:
    """Return the number of a machine's cores on which the ranks of an emulated network compute.

    The other half carries messages.  The kernel's work for messages would otherwise interrupt a rank's computation
    and count as its processor time.  A single core does both.
    """
    return max(1, cores // 2)


class CoreAssignment:
    """The cores that this process may use, divided into one compute core and the cores for messages."""

    def __init__(self, place: int):
        """`place`: index of this process among the processes on these cores."""
        cores = sorted(os.sched_getaffinity(0))
        compute = cores[: count_compute_cores(len(cores))]
        self.compute = {compute[place % len(compute)]}
        """Core of this process's computation."""
        self.messages = set(cores[len(compute) :]) or set(cores)
        """Cores that carry messages; with a single core, the compute core."""

    def apply(self) -> None:
        """Put this thread on its compute core, and the other threads of the process on the cores for messages.

        A new thread inherits the cores of its creator, so call `apply` again after threads have started.
        """
        this_thread = threading.get_native_id()
        for name in os.listdir("/proc/self/task"):
            thread = int(name)
            try:
                os.sched_setaffinity(thread, self.compute if thread == this_thread else self.messages)
            except ProcessLookupError:  # the thread has ended
                continue


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on, where the C library has `mallopt`.

    By default glibc returns large blocks to the kernel and requests them again at the next step.  The kernel zeroes
    them page by page: 2 to 20 us for each 4 kB, up to half of a small step's compute.  The delay hits one rank at a
    time, and all other ranks wait for it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
        mallopt(_M_MMAP_MAX, 0)


def reserve_heap(peak: int, processes: int) -> None:
    """Touch and free heap memory for steps of at most `peak` bytes.

    `processes`: number of processes that reserve heap at the same time.  They share half of the available memory.
    """
    import torch

    torch.ones(min(HEAP_PEAKS * peak, available_bytes() // (2 * processes)), dtype=torch.uint8)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable Python's collection of reference cycles inside the context.

    Each collection costs time in proportion to the live objects, and a trace makes millions without cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
