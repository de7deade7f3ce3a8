"""Settings of a rank's device: index, environment of CUDA and NCCL, deterministic algorithms, memory limit.

The environment is set before torch is imported, so this module imports torch inside functions only.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.measure.provenance import major_minor, versions

if TYPE_CHECKING:
    import torch

MAX_CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable: number of device queues that the streams of a process share; the default is 8.

A pipeline rank has a stream for each of up to ten communicators, and further streams. A waiting stream delays the other
streams of its queue. Megatron-LM requires 1 queue with several tp ranks, so that products begin after the messages that
they overlap with. The schedules of this suite hang under neither setting (`tests/parallel/test_streams.py`).
"""
AVOID_RECORD_STREAMS_VARIABLE = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""Environment variable of torch up to 2.7: with `1`, a collective holds a reference to its tensors until it is waited
for, as torch 2.8 does. Otherwise the allocator records every stream that uses a tensor, and reuses the memory that ZeRO
frees only after it has polled events."""
HIGH_PRIORITY_VARIABLE = "TORCH_NCCL_HIGH_PRIORITY"
"""Environment variable: with `1`, a collective gets a free multiprocessor before the products that it overlaps with.
DeepSpeed and Megatron-core set priorities themselves."""
DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""Environment for bitwise reproducible runs (`deterministic_algorithms`). cuBLAS selects algorithms by its workspace,
so the workspace is fixed. NVLink switches (NVLS) do not sum, as in Megatron-LM's deterministic mode."""
GLOO_THREADS_PER_GROUP = 3
"""Threads that a gloo process group starts."""


def rank_device(kind: str) -> torch.device:
    """Return the device of this rank: `cpu`, or on `cuda` the GPU with the index of `LOCAL_RANK`."""
    import torch

    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", cuda_device_index(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))


def cuda_device_index(local_rank: int, visible: int) -> int:
    """Return the index of a rank's GPU among the `visible` ones.

    `rank % visible` would be wrong: the ranks of a node need not start at a multiple of its GPUs.
    """
    if visible == 1:  # a scheduler that binds each task to a GPU shows it nothing else
        return 0
    if local_rank >= visible:
        raise RuntimeError(f"no GPU for local rank {local_rank}: {visible} visible")
    return local_rank


def choose_gpu_environment(experiments: Sequence[Experiment], torch_version: str) -> dict[str, str]:
    """Return the variables for a process that runs `experiments` with this version of torch (`2.6.0+cu126`)."""
    in_order = any(e.engine == "megatron" and e.layout.tp > 1 for e in experiments)
    found = {MAX_CONNECTIONS_VARIABLE: "1" if in_order else "32"}
    if (2, 6) <= major_minor(torch_version) < (2, 8):
        found[AVOID_RECORD_STREAMS_VARIABLE] = "1"
    if all(e.engine == NATIVE for e in experiments):
        found[HIGH_PRIORITY_VARIABLE] = "1"
    if any(e.training.deterministic for e in experiments):
        found |= DETERMINISTIC_ENVIRONMENT
    return found


def apply_gpu_environment(experiments: Sequence[Experiment]) -> None:
    """Set the variables in this process, except those that the user has set."""
    for name, value in choose_gpu_environment(experiments, versions(["torch"]).get("torch", "")).items():
        os.environ.setdefault(name, value)


def current_gpu_environment() -> dict[str, str]:
    """Return the values of these variables in this process."""
    names = (MAX_CONNECTIONS_VARIABLE, AVOID_RECORD_STREAMS_VARIABLE, HIGH_PRIORITY_VARIABLE)
    return {name: os.environ[name] for name in (*names, *DETERMINISTIC_ENVIRONMENT) if name in os.environ}


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Enable torch's deterministic algorithms inside the context, if `wanted`.

    The kernels of `kernels/*.cu` are deterministic, because they use no atomics. The backward pass of torch's fused
    attention needs this setting. An operator without a deterministic algorithm raises RuntimeError.
    """
    if not wanted:
        yield
        return
    import torch

    settings = torch.utils.deterministic
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # every buffer at every use: nothing is read unwritten
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def limit_memory(limit_bytes: int, device: str) -> None:
    """Limit this rank to `limit_bytes` in addition to its present memory; 0 means no limit.

    On the CPU, `RLIMIT_DATA` is set to the present size of the data segment (`VmData`: heap and private writable
    mappings, thread stacks included) plus `limit_bytes`.  The present size is added because the memory of torch itself
    differs between builds by more than a small model, and is not part of a GPU's memory either.  On CUDA, the limit is
    the fraction of the device that torch's caching allocator may use.
    """
    if not limit_bytes:
        return
    if device == "cuda":
        import torch

        index = rank_device(device).index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_segment_bytes() + limit_bytes, hard))
    _check_memory_before_groups()


def _check_memory_before_groups() -> None:
    """Raise `MemoryError` if the limit does not allow the thread stacks of a new process group.

    Without this check, gloo ends the process (`terminate called without an active exception`, SIGABRT), raises
    `Resource temporarily unavailable` or never returns. None of these reports a lack of memory.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = 2 << 20 if stack == resource.RLIM_INFINITY else stack  # pthread_create(3)
    size = GLOO_THREADS_PER_GROUP * stack
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


def data_segment_bytes() -> int:
    """Return the size of this process's data segment in bytes, as `RLIMIT_DATA` counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData: a memory limit needs Linux")
