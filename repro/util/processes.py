"""Cores, memory, core affinity and garbage collection of this process, and pools of worker processes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor


_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Identifiers of the two parameters of glibc's `mallopt` that `keep_freed_memory` sets, from malloc.h."""
_NEVER_TRIM = 2**31 - 1
HEAP_PEAKS = 3
"""Heap that `reserve_heap` allocates, in multiples of a step's peak memory; the first five steps use up to 2.4."""


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent process dies for any reason; do nothing on other systems.

    `parent`: process id of the parent; with 0, the function does nothing.  Raises `OSError` if the kernel refuses.
    """
    if not parent or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # If the parent died before `prctl`, the kernel sends no signal.
        os._exit(1)


def usable_cores() -> int:
    """Return the number of logical cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the host memory in bytes that processes can allocate without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def memory_and_swap() -> int:
    """Return the available host memory plus the free swap space in bytes."""
    import psutil

    return available_bytes() + int(psutil.swap_memory().free)


def count_compute_cores(cores: int) -> int:
    """Return how many of a machine's `cores` the ranks of an emulated network use for computation: one half.

    The other cores send and receive messages, which would interrupt the computation of a rank on the same core.  On a
    machine with a single core, this core does both.
    """
    return max(1, cores // 2)


class CoreAssignment:
    """Core on which this process computes, and cores on which its threads send and receive network messages."""

    def __init__(self, index: int):
        """Choose the cores of a process. `index`: number of the process among those that share the usable cores."""
        cores = sorted(os.sched_getaffinity(0))
        compute = cores[: count_compute_cores(len(cores))]
        self.compute = {compute[index % len(compute)]}
        """Id of the single core on which the process computes, as a set with one element."""
        self.messages = set(cores[len(compute) :]) or set(cores)
        """Ids of the cores for the threads that send and receive network messages."""

    def apply(self) -> None:
        """Bind the calling thread to the compute core, and all other threads of the process to the cores for messages.

        A new thread inherits the affinity of its creator, so call `apply` again after threads have started.
        """
        this_thread = threading.get_native_id()
        for name in os.listdir("/proc/self/task"):
            thread = int(name)
            try:
                os.sched_setaffinity(thread, self.compute if thread == this_thread else self.messages)
            except ProcessLookupError:  # A thread may end before its core affinity is set.
                continue


def keep_freed_memory() -> None:
    """Configure glibc to reuse freed memory for later allocations; do nothing with another C library.

    By default glibc returns large blocks to the kernel and requests them again at the next step.  The kernel then
    zeroes each page of 4 kB in 2 to 20 us, which takes up to half of the compute time of a small step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
        mallopt(_M_MMAP_MAX, 0)


def reserve_heap(peak: int, processes: int) -> None:
    """Allocate, touch and free `HEAP_PEAKS` times `peak` bytes, so that training steps need no new pages.

    `processes`: number of concurrent callers, which together allocate at most half of the available host memory.
    """
    import torch

    torch.ones(min(HEAP_PEAKS * peak, available_bytes() // (2 * processes)), dtype=torch.uint8)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector inside the context.

    The time of a collection grows with the live objects; a traced step creates millions without reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


T = TypeVar("T")
PRELOADED = ["torch", "torch.fx.experimental.symbolic_shapes"]
"""Modules that multiprocessing's fork server imports once, so that every worker process starts with them loaded."""
MIN_PARALLEL_TASKS = 6
"""Minimum number of tasks for which `Workers` starts a pool, because a worker process needs seconds to import torch."""
WORKER_BYTES = 2 * 2**30
"""Assumed maximum host memory of one worker process, in bytes."""


class WorkerDied(Exception):
    """Exception for a worker process that ended without a result, for example because host memory was exhausted."""

    def __init__(self) -> None:
        super().__init__("a worker process was killed, perhaps because the host memory was full")


class Workers:
    """Context manager of a pool of worker processes, which start with the first tasks and end with the context."""

    def __init__(self, maximum: int = 0):
        """Set the maximum number of worker processes; 0: as cores and memory allow; 1: tasks run in this process."""
        limit = max(1, min(usable_cores(), available_bytes() // WORKER_BYTES))
        self.count = min(maximum or limit, limit)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # After an exception, Python would wait at its exit for the running tasks.
                for process in self._processes():
                    process.kill()
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def _processes(self) -> list[Any]:
        """Return the worker processes, to kill them: `ProcessPoolExecutor.kill_workers` requires Python 3.14."""
        return list((getattr(self._pool, "_processes", None) or {}).values())

    def start(self) -> None:
        """Start the worker pool now; otherwise, `begin` and `map` run a few tasks in this process, without a pool."""
        if self.count > 1 and self._pool is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import forkserver, get_context

            context = get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPoolExecutor(self.count, context, _prepare)
            forkserver.ensure_running()

    def map(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
        """Return `function(*task)` for each task, in order.  Raises the exceptions of `function`, and `WorkerDied`."""
        return self.begin(function, tasks)()

    def begin(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Callable[[], list[T]]:
        """Submit tasks to the worker pool; return a function that waits for all results and returns them in order."""
        if self.count == 1 or (self._pool is None and len(tasks) < MIN_PARALLEL_TASKS):
            return lambda: [function(*task) for task in tasks]
        futures = self._submit(function, tasks)
        return lambda: [_result(future) for future in futures]

    def completed(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """Yield `function(*task)` for each task as soon as the task ends; a single task runs in the calling process."""
        if min(self.count, len(tasks)) <= 1:
            for task in tasks:
                yield function(*task)
            return
        from concurrent.futures import as_completed

        for future in as_completed(self._submit(function, tasks)):
            yield _result(future)

    def _submit(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[Future[T]]:
        self.start()
        assert self._pool is not None
        return [self._pool.submit(function, *task) for task in tasks]


def _result(future: Future[T]) -> T:
    from concurrent.futures.process import BrokenProcessPool

    try:
        return future.result()
    except BrokenProcessPool:
        raise WorkerDied from None


def _outlive_nobody() -> None:
    """End this worker process after the process that owns the pool has ended, which the fork server does not do."""
    from multiprocessing import parent_process

    user = parent_process()
    assert user is not None
    user.join()
    os._exit(1)


def _prepare() -> None:
    """Initialise a worker process, which ends with the pool's owner, ignores Ctrl-C and runs torch on one thread."""
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # Worker output must not mix with a JSON document on standard output.
