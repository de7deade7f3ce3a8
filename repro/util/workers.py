"""Worker processes for many tasks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from repro.util.processes import available_bytes, usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

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

    def __init__(self, most: int = 0):
        """`most`: maximum number of processes; 1 runs all tasks in this process, 0 means as many as cores and memory
        allow."""
        room = max(1, min(usable_cores(), available_bytes() // WORKER_BYTES))
        self.count = min(most or room, room)
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
