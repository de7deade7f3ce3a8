"""Traces on all cores: a few processes that are started when there is enough to do for them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from repro.measure.provenance import memory, usable_cores

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

T = TypeVar("T")
WORTH = 6
"""Fewer tasks than these are done here: a process needs seconds to import torch."""
WORKER_BYTES = 2 * 2**30
"""Host memory that one trace may take, at most."""


class Workers:
    """Use as a context manager; `map` may be called several times and keeps the processes."""

    def __init__(self, most: int = 0):
        """`most`: processes to use, 1 for none but this one; 0: as many as there are cores and memory."""
        room = max(1, min(usable_cores(), memory()["available_bytes"] // WORKER_BYTES))
        self.count = min(most or room, room)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
        """`function(*task)` of every task, in their order."""
        if self.count == 1 or (self._pool is None and len(tasks) < WORTH):
            return [function(*task) for task in tasks]
        if self._pool is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            self._pool = ProcessPoolExecutor(self.count, get_context("spawn"), prepare, (os.getpid(),))
        futures = [self._pool.submit(function, *task) for task in tasks]
        return [future.result() for future in futures]


def prepare(parent: int) -> None:
    """A worker lives no longer than `parent`, leaves Ctrl-C to it, and takes one core."""
    from repro.launch.rank import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # the parent's output is one document
