"""Processes of this machine: cores, memory, core affinity and garbage collection, and pools of worker processes."""

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


T = TypeVar("T")
PRELOADED = ["torch", "torch.fx.experimental.symbolic_shapes"]
"""Modules that the fork server imports once for all workers.  Traces need both, the second for their first shapes."""
MIN_PARALLEL_TASKS = 6
"""Minimum number of tasks for which processes are started; a process needs seconds to import torch."""
WORKER_BYTES = 2 * 2**30
"""Maximum host memory of one trace, in bytes."""


class WorkerDied(Exception):
    """A worker process ended without a result, for example killed for lack of memory."""

    def __init__(self) -> None:
        super().__init__("a worker process died: killed, perhaps for want of memory")


class Workers:
    """A pool of processes, used as a context manager; its methods keep the processes for the next call."""

    def __init__(self, maximum: int = 0):
        """`maximum`: of processes; 1 runs all tasks in this process, 0 means as many as cores and memory allow."""
        limit = max(1, min(usable_cores(), available_bytes() // WORKER_BYTES))
        self.count = min(maximum or limit, limit)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # otherwise the interpreter would wait at its end for running tasks
                for process in self._processes():
                    process.kill()
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def _processes(self) -> list[Any]:
        """Return the pool's processes.  The pool itself can kill them only from Python 3.14 on."""
        return list((getattr(self._pool, "_processes", None) or {}).values())

    def start(self) -> None:
        """Start the pool and the imports of its fork server.  After that even a single task runs in a process."""
        if self.count > 1 and self._pool is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import forkserver, get_context

            context = get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPoolExecutor(self.count, context, _prepare)
            forkserver.ensure_running()

    def map(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
        """Return `function(*task)` of every task, in order.  Raises exceptions of `function`, and `WorkerDied`."""
        return self.begin(function, tasks)()

    def begin(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Callable[[], list[T]]:
        """Submit tasks to the pool, and return a function that waits for the results of `map`."""
        if self.count == 1 or (self._pool is None and len(tasks) < MIN_PARALLEL_TASKS):
            return lambda: [function(*task) for task in tasks]
        futures = self._submit(function, tasks)
        return lambda: [_result(future) for future in futures]

    def completed(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """Yield the results in order of completion.  Two tasks or more run in processes."""
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
    """End this worker when the process that uses the pool ends, even by SIGKILL; the fork server would wait for it."""
    from multiprocessing import parent_process

    user = parent_process()
    assert user is not None
    user.join()
    os._exit(1)


def _prepare() -> None:
    """Set up a worker: it ends with the pool's user, ignores Ctrl-C, and uses one thread."""
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # the parent's output is one document
