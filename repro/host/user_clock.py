"""Seconds in which a thread ran its own code, without those of the kernel that it is charged with.

A kernel without `IRQ_TIME_ACCOUNTING` charges the thread that had the core with the frames that came for all others,
and what it says of a thread's own code has ticks of milliseconds.  So its profiler takes a sample in every `PERIOD_S`
of the thread's time and keeps those in which the thread ran its own code; they are counted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time

PERIOD_S = 100e-6
_CALL = {"x86_64": 298, "aarch64": 241}
"""Numbers of the system call perf_event_open, which the C library has no function for."""
_SOFTWARE, _TASK_CLOCK = 1, 1
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_ATTRIBUTES, _SAMPLE = struct.Struct("<IIQQQQQIIQ"), 8
"""The first version of `struct perf_event_attr`; bytes of a sample without fields, which is its header."""
_WRITTEN = 1024
"""Where the page of a buffer says how many bytes were written to it, older ones overwritten."""


class UserClock:
    """Seconds of user code of the thread that makes it, as it calls it."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        try:
            descriptor = _sampled()
        except OSError:
            return
        try:
            self._page = mmap.mmap(descriptor, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ)
        except OSError:
            pass  # more locked pages than a user may have
        finally:
            os.close(descriptor)  # the mapping holds the samples

    @property
    def exact(self) -> bool:
        """Whether this kernel tells; else it counts all seconds that the thread had a core."""
        return self._page is not None

    def __call__(self) -> float:
        if self._page is None:
            return time.thread_time()
        written: int = struct.unpack_from("<Q", self._page, _WRITTEN)[0]
        return written // _SAMPLE * PERIOD_S


def _sampled() -> int:
    """The descriptor of this thread's samples.  Raises `OSError` where the kernel gives none."""
    number = _CALL.get(platform.machine())
    if number is None:
        raise OSError(f"no perf_event_open known for {platform.machine()}")
    excluded = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    period = round(PERIOD_S * 1e9)
    attributes = _ATTRIBUTES.pack(_SOFTWARE, _ATTRIBUTES.size, _TASK_CLOCK, period, 0, 0, excluded, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    close_on_exec, this_thread, any_core, no_group = 8, 0, -1, -1
    descriptor: int = libc.syscall(number, attributes, this_thread, any_core, no_group, close_on_exec)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    return descriptor
