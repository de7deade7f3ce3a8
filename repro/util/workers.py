"""Functions run on all cores: a few processes that are started when there is enough to do for them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from repro.util.resources import available_bytes, usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

T = TypeVar("T")
PRELOADED = ["torch", "torch.fx.experimental.symbolic_shapes"]
"""Imported once, by the process of which all workers are forks: what traces need, the second for their first shapes."""
WORTH = 6
"""Fewer tasks than these are done here: a process needs seconds to import torch."""
WORKER_BYTES = 2 * 2**30
"""Host memory that one trace may take, at most."""


class WorkerDied(Exception):
    """A worker process ended without an answer: killed, perhaps for want of memory."""

    def __init__(self) -> None:
        super().__init__("a worker process died: killed, perhaps for want of memory")


class Workers:
    """Use as a context manager; its methods may be called several times and keep the processes."""

    def __init__(self, most: int = 0):
        """`most`: processes to use, 1 for none but this one; 0: as many as there are cores and memory."""
        room = max(1, min(usable_cores(), available_bytes() // WORKER_BYTES))
        self.count = min(most or room, room)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # the interpreter would wait at its end for what they are at
                for process in self._processes():
                    process.kill()
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def _processes(self) -> list[Any]:
        """Of the pool, which has a method to kill them from Python 3.14."""
        return list((getattr(self._pool, "_processes", None) or {}).values())

    def start(self) -> None:
        """Begin to import what tasks need in another process, before there are any: then even one goes there."""
        if self.count > 1 and self._pool is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import forkserver, get_context

            context = get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPoolExecutor(self.count, context, _prepare)
            forkserver.ensure_running()

    def map(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
        """`function(*task)` of every task, in their order.  Raises what it raises, and `WorkerDied`."""
        return self.begin(function, tasks)()

    def begin(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Callable[[], list[T]]:
        """`map`, of which others begin now, and which is over when what is returned has been called."""
        if self.count == 1 or (self._pool is None and len(tasks) < WORTH):
            return lambda: [function(*task) for task in tasks]
        futures = self._submit(function, tasks)
        return lambda: [_result(future) for future in futures]

    def completed(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """The same in the order in which they get ready, in processes if there are two tasks or more."""
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
    """End when the process that uses this worker does, even by SIGKILL: the one that it is a fork of waits for it."""
    from multiprocessing import parent_process

    user = parent_process()
    assert user is not None
    user.join()
    os._exit(1)


def _prepare() -> None:
    """A worker lives no longer than the process that uses it, leaves Ctrl-C to it, and takes one core."""
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # the parent's output is one document
