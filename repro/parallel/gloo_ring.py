"""Reduce-scatter and all-gather in a ring, for groups that have several ranks on each of several nodes.

`GlooTransport` sends every part directly to each rank, so a part crosses the link between two nodes once per rank of
the target node.  In a ring of the ranks in their order a part enters and leaves each node once, as in NCCL's rings and
in gloo's all-reduce.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from repro.config.enums import Category
from repro.parallel.storage import empty
from repro.parallel.transports import GlooTransport, Work

RingOperation = Callable[[], None]


def needs_ring(ranks: Sequence[int], per_node: int) -> bool:
    """Return whether `ranks` are on several nodes and several are on one node; `per_node`: world ranks per node."""
    nodes = [rank // per_node for rank in ranks]
    return 1 < len(set(nodes)) < len(nodes)


def ranks_per_node(world: int) -> int:
    """Return the ranks per node from `LOCAL_WORLD_SIZE`; without it, one node has all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class GlooRing(GlooTransport):
    """gloo transport whose reduce-scatter runs its steps in a thread, so that they overlap with computation."""

    def __init__(self, group: dist.ProcessGroup, channel: int = 0):
        super().__init__(group, channel)
        self._jobs: queue.SimpleQueue[RingOperation | None] | None = None

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        parts, tag = input.chunk(self.size), self._next_tag()
        received = empty(input.numel() - output.numel(), input, Category.COMMUNICATION).chunk(self.size - 1)
        following, previous = (self._global[(self.rank + by) % self.size] for by in (1, -1))

        def steps() -> None:
            # All receives are posted at once: a receive posted in a step would cost a turn of the scheduler.
            coming = [dist.irecv(part, previous, group=self.group, tag=tag) for part in received]
            partial, going = parts[self.rank - 1], []
            for step, (part, arrival) in enumerate(zip(received, coming, strict=True)):
                going.append(dist.isend(partial, following, group=self.group, tag=tag))
                _wait(arrival)
                partial = part.add_(parts[self.rank - step - 2])
            for work in going:
                _wait(work)
            output.copy_(partial)

        return self._beside(steps)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather with gloo's all-gather, which uses a ring."""
        parts = list(output.chunk(self.size))
        return Work(dist.all_gather(parts, input, group=self.group, async_op=True))

    def _beside(self, steps: RingOperation) -> Work:
        """Queue `steps` for the thread; the work is done when they end, and raises their exception."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name="gloo ring", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        over, failure = threading.Event(), list[BaseException]()

        def job() -> None:
            try:
                with torch.no_grad():
                    steps()
            except BaseException as error:  # the wait raises it
                failure.append(error)
            over.set()

        def finish() -> None:
            over.wait()
            if failure:
                raise failure[0]

        self._jobs.put(job)
        return Work(finish=finish)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _run(jobs: queue.SimpleQueue[RingOperation | None]) -> None:
    while job := jobs.get():
        job()
        del job  # it holds the transport, whose end ends this thread
