"""Settings of a rank's device: GPU index, environment of CUDA and NCCL, deterministic algorithms, memory limit.

The environment must be set before torch is imported, so this module imports torch only inside functions.
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
"""Environment variable with the number of hardware queues that the CUDA streams of a process share; the default is 8.

A rank with pipeline parallelism has more than 8 streams, and a waiting stream delays the other streams of its queue.
Megatron-LM requires 1 queue if tp > 1, so that a matrix product starts after the collective with which it overlaps.
"""
AVOID_RECORD_STREAMS_VARIABLE = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""Environment variable of torch up to 2.7. With `1`, a collective references its tensors until the caller waits for it,
as in torch 2.8. Otherwise the allocator reuses freed memory only after polling events of all streams that used it."""
HIGH_PRIORITY_VARIABLE = "TORCH_NCCL_HIGH_PRIORITY"
"""Environment variable of torch for the priority of NCCL's streams. With `1`, a free multiprocessor runs a collective
before matrix products that overlap with it. DeepSpeed and Megatron-core set priorities themselves."""
DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""Environment variables for bitwise reproducible runs. cuBLAS, which selects algorithms by its workspace, gets a fixed
workspace. Sums in NVLink switches (NVLS) are disabled, as in Megatron-LM's deterministic mode."""
GLOO_THREADS_PER_GROUP = 3
"""Number of threads that gloo starts for each process group."""


def rank_device(kind: str) -> torch.device:
    """Return the device of this rank: the CPU for the kind `cpu`, or the GPU that `LOCAL_RANK` selects for `cuda`."""
    import torch

    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", cuda_device_index(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))


def cuda_device_index(local_rank: int, visible: int) -> int:
    """Return the CUDA device index of the node's rank `local_rank`. `visible`: number of GPUs that the rank sees."""
    if visible == 1:  # The scheduler may show each task only one GPU, whose index is 0.
        return 0
    if local_rank >= visible:
        raise RuntimeError(f"no GPU for local rank {local_rank}: this process sees {visible} GPUs")
    return local_rank


def choose_gpu_environment(experiments: Sequence[Experiment], torch_version: str) -> dict[str, str]:
    """Return CUDA and NCCL variables of a rank that runs `experiments` with a torch version, such as `2.6.0+cu126`."""
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
    """Set the CUDA and NCCL environment variables for `experiments`, except variables that the user has set."""
    for name, value in choose_gpu_environment(experiments, versions(["torch"]).get("torch", "")).items():
        os.environ.setdefault(name, value)


def current_gpu_environment() -> dict[str, str]:
    """Return those CUDA and NCCL environment variables of this process that `choose_gpu_environment` may set."""
    names = (MAX_CONNECTIONS_VARIABLE, AVOID_RECORD_STREAMS_VARIABLE, HIGH_PRIORITY_VARIABLE)
    return {name: os.environ[name] for name in (*names, *DETERMINISTIC_ENVIRONMENT) if name in os.environ}


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Enable torch's deterministic algorithms inside the context, if `wanted`.

    The backward pass of torch's fused attention needs this setting. An operator without a deterministic algorithm then
    raises RuntimeError. The kernels of this package are always deterministic.
    """
    if not wanted:
        yield
        return
    import torch

    settings = torch.utils.deterministic
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    # By default, torch would fill every new buffer, although a training step reads no uninitialised memory.
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def limit_memory(limit_bytes: int, device: str) -> None:
    """Limit the memory of this rank to `limit_bytes`; 0 means no limit.

    On CUDA, the limit applies to torch's caching allocator. On the CPU, `RLIMIT_DATA` limits the heap, private mappings
    and thread stacks to `limit_bytes` above their present size. The memory of the imported libraries does not count.
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
    """Let torch raise `MemoryError` if the memory limit does not allow the thread stacks of a new process group.

    Without this check, gloo aborts the process, raises `Resource temporarily unavailable` or hangs.
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
            raise MemoryError(f"{error.strerror}: the threads of a process group need {size} bytes") from None
        return make(*arguments, **named)

    groups._new_process_group_helper = checked


def lift_memory_limit() -> None:
    """Remove the limit on host memory, so that the report of an out-of-memory error can be written."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def data_segment_bytes() -> int:
    """Return the bytes of heap, private mappings and thread stacks of this process, which `RLIMIT_DATA` limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData: a memory limit needs Linux")
