"""The limit on a rank's memory (`limits.memory_bytes`), and what says so where it is met."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path
from typing import Any

from repro.launch.rank.device import own_device

GLOO_THREADS = 3
"""That a process group of gloo starts."""


def limit_memory(limit_bytes: int, device: str) -> None:
    """Let this rank take `limit_bytes` on top of what interpreter and libraries hold now; 0 means no limit.

    On the CPU that is `RLIMIT_DATA` at the present size of the data segment (`VmData`: heap and private
    writable mappings, thread stacks included) plus `limit_bytes`: what torch itself needs differs from
    build to build by more than a small model, and a GPU's memory does not hold it either.  On CUDA it is
    the fraction of the device that torch's caching allocator may use.
    """
    if not limit_bytes:
        return
    if device == "cuda":
        import torch

        index = own_device(device).index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit_bytes, hard))
    _look_for_room_before_groups()


def _look_for_room_before_groups() -> None:
    """Raise `MemoryError` where there is no room for the stacks of a new process group's threads.

    gloo itself then ends the process (`terminate called without an active exception`, SIGABRT), raises `Resource
    temporarily unavailable` or never returns, and none of it says that memory is what lacks.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    size = GLOO_THREADS * (2 << 20 if stack == resource.RLIM_INFINITY else stack)  # pthread_create(3)
    make = groups._new_process_group_helper

    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise MemoryError(f"{error.strerror}: {size} bytes for the threads of a process group") from None
        return make(*arguments, **named)

    groups._new_process_group_helper = checked


def lift_memory_limit() -> None:
    """Undo `limit_memory`, so that the report of an out-of-memory does not run out of memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def data_bytes() -> int:
    """Present size of this process's data segment in bytes, as `RLIMIT_DATA` counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData: a memory limit needs Linux")
