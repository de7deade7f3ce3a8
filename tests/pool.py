"""Pools of gloo ranks that many tests share. A pool is killed if a rank fails or hangs."""

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
"""Time limit for the start of the ranks and for the stack trace of a hanging rank, in seconds."""
GRACE_S = 3.0
"""Time limit for the errors of the other ranks after the first failure, in seconds."""
PRELOADED = [
    *("pytest", "torch.distributed", "torch.profiler", "torch._dynamo"),
    *("repro.wrap.parallelize", "repro.measure.memory", "tests.training"),
    *("repro.engines.native.engine", "repro.engines.torch.engine"),
]
"""Modules that the fork server imports once for all ranks, because an import takes longer than most tests."""


def forks() -> Any:
    """Return a context that forks processes from a server which has imported `PRELOADED`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _avoid_preemption()
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        task = _receive(pipe)
        if task is None:
            os._exit(0)  # A regular exit of the interpreter takes seconds in eight processes.
        function, arguments, timeout_s = task
        late = threading.Timer(timeout_s, _send_stack, (pipe, rank, timeout_s))
        late.start()
        try:
            answer = True, function(*arguments)
        except Exception:
            answer = False, f"rank {rank}:\n{traceback.format_exc()}"
        late.cancel()
        _send(pipe, answer)


def _send_stack(pipe: Any, rank: int, timeout_s: float) -> None:
    """Send the stack of the main thread of a hanging rank as its answer."""
    stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
    _send(pipe, (False, f"rank {rank} did not answer within {timeout_s} s, it is at\n{''.join(stack)}"))


def _avoid_preemption() -> None:
    """Set a scheduling policy for this rank's threads under which a wake-up preempts no running thread.

    gloo's receiving thread polls without sleeping for a lock that the sender holds. A preempted sender therefore costs
    a tiny model several times its own work. Parity tests on a busy machine take a third less CPU time with it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # A container may forbid the policy; tests then take longer.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _send(pipe: Any, message: object) -> None:
    """Send pickled bytes, because torch makes `pipe.send` share tensors through sockets that remain in /tmp."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


class RankPool:
    """A gloo group of `world` processes. `run` calls a module-level function on all ranks."""

    def __init__(self, world: int):
        self.world = world
        self._store: Any = None
        """Rendezvous of the ranks, in this process, so that no file remains if the tests are killed."""
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
        """Call `function(*arguments)` on every rank and return the results by rank. Fails if a rank raises or hangs."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                _send(pipe, (function, arguments, timeout_s))
            return self._answers(timeout_s)
        except BaseException:  # The next test would receive late answers.
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
                    succeeded, value = _receive(pipe)
                except EOFError:
                    succeeded, value = False, f"rank {rank} of {self.world} died"
                if succeeded:
                    answers[rank] = value
                else:  # The other ranks may wait for the failed rank.
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if silent or errors:
            raise AssertionError("\n".join(errors) or f"no answer from ranks {sorted(silent.values())}")
        return [answers[rank] for rank in range(self.world)]

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = forks()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self._store.port, theirs), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(5)
        self._processes, self._pipes, self._store = [], [], None


def pool_of(request: pytest.FixtureRequest, layout: Layout) -> RankPool:
    """Return the session's pool with as many ranks as the layout."""
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four", 8: "eight"}[layout.world])
    return pool
