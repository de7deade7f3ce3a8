"""Real gloo processes for tests: started once, used by many tests, killed when one of them hangs."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from repro.config import Layout

TIMEOUT_S = 200.0
START_S = 60.0
"""For ranks to begin, and for the word of one that hangs."""
GRACE_S = 3.0
"""For what the other ranks have to say once one has failed."""
PRELOADED = [
    *("pytest", "torch.distributed", "torch.profiler", "torch._dynamo"),
    *(
        "repro.wrap.parallelize",
        "repro.measure.memory",
        "repro.engines.native.engine",
        "repro.engines.torch.engine",
    ),
    "tests.training",
]
"""Imported once, by the process that every rank is a fork of; importing them costs more than most tests."""


def forks() -> Any:
    """Starts processes that have imported what ranks need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _let_others_finish()
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        task = _receive(pipe)
        if task is None:
            os._exit(0)  # nothing to save, and the interpreter's way out takes seconds of eight processes
        function, arguments, timeout_s = task
        late = threading.Timer(timeout_s, _say_where, (pipe, rank, timeout_s))
        late.start()
        try:
            answer = True, function(*arguments)
        except Exception:
            answer = False, f"rank {rank}:\n{traceback.format_exc()}"
        late.cancel()
        _send(pipe, answer)


def _say_where(pipe: Any, rank: int, timeout_s: float) -> None:
    """Answer in the place of a rank that hangs."""
    stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
    _send(pipe, (False, f"rank {rank} did not answer within {timeout_s} s, it is at\n{''.join(stack)}"))


def _let_others_finish() -> None:
    """This rank's threads, also those to come, take no core from a thread that runs when a message has come for them.

    gloo sends under a lock that its receiving thread polls for without sleeping: a sender put aside in between costs
    ranks of a tiny model several times their own work, all of it in the kernel.  Beside a busy core, parity
    tests take a third less CPU and a fifth less time with this.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # a container may forbid it, and tests then take longer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _send(pipe: Any, message: object) -> None:
    """Plain bytes: torch would have `pipe.send` share its tensors through sockets in /tmp, which stay there."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


class RankPool:
    """`world` processes in one gloo group; `run` calls a module-level function on all of them."""

    def __init__(self, world: int):
        self.world = world
        self._store: Any = None
        """Where the ranks meet: in this process, so that nothing is left however the tests end."""
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            try:
                _send(pipe, None)
            except OSError:
                continue
        for process in self._processes:
            process.join(5)
        self._kill()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """`function(*arguments)` on every rank, results by rank.  Fails if a rank raises or does not answer."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                _send(pipe, (function, arguments, timeout_s))
            return self._answers(timeout_s)
        except BaseException:  # also a test's limit: what comes later would be the next one's answers
            self._kill()
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        silent = dict(zip(self._pipes, range(self.world), strict=True))
        answers: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + timeout_s + START_S
        while silent and (ready := wait(list(silent), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    good, value = _receive(pipe)
                except EOFError:
                    good, value = False, f"rank {rank} of {self.world} died"
                if good:
                    answers[rank] = value
                else:  # the others may wait for it
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if silent or errors:
            raise AssertionError("\n".join(errors) or f"nothing is heard of ranks {sorted(silent.values())}")
        return [answers[rank] for rank in range(self.world)]

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = forks()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self._store.port, theirs), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(5)
        self._processes, self._pipes, self._store = [], [], None


def pool_of(request: pytest.FixtureRequest, layout: Layout) -> RankPool:
    """Return the session's pool with as many ranks as the layout."""
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four", 8: "eight"}[layout.world])
    return pool
