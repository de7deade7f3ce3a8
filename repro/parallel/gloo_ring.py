"""Reduce-scatter and all-gather in a ring, for groups that have several ranks on each of several nodes.

Every part that `GlooTransport` sends straight to each rank that needs it crosses the link between two nodes once for
every rank there.  Round a ring of the ranks in their order it enters and leaves each node once, as it does in NCCL's
rings and in gloo's all-reduce.
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

Job = Callable[[], None]


def crowded(ranks: Sequence[int], per_node: int) -> bool:
    """Whether a group of `ranks`, `per_node` of the world on each node, has several on one node and is on several."""
    nodes = [rank // per_node for rank in ranks]
    return 1 < len(set(nodes)) < len(nodes)


def ranks_per_node(world: int) -> int:
    """Ranks of this node, as whoever started them says; without a word all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class GlooRing(GlooTransport):
    """A ring's steps follow each other on a thread, so that they go on beside computation."""

    def __init__(self, group: dist.ProcessGroup, channel: int = 0):
        super().__init__(group, channel)
        self._jobs: queue.SimpleQueue[Job | None] | None = None

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        n, parts, tag = self.size, input.chunk(self.size), self._next_tag()
        partial, received = empty(2 * output.numel(), input, Category.COMMUNICATION).chunk(2)

        def steps() -> None:
            partial.copy_(parts[(self.rank - 1) % n])
            for step in range(n - 1):
                self._pass_on(partial, received, tag)
                torch.add(received, parts[(self.rank - step - 2) % n], out=partial)
            output.copy_(partial)

        return self._beside(steps)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        n, parts, tag = self.size, output.chunk(self.size), self._next_tag()
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)

        def steps() -> None:
            for step in range(n - 1):
                self._pass_on(parts[(self.rank - step) % n], parts[(self.rank - step - 1) % n], tag)

        return self._beside(steps)

    def _pass_on(self, mine: Tensor, received: Tensor, tag: int) -> None:
        """One step of the ring: to the next rank, from the one before."""
        following, previous = (self._global[(self.rank + by) % self.size] for by in (1, -1))
        coming = dist.irecv(received, previous, group=self.group, tag=tag)
        going = dist.isend(mine, following, group=self.group, tag=tag)
        for work in (coming, going):
            if work is not None:
                work.wait()

    def _beside(self, steps: Job) -> Work:
        """Run `steps` after those before them; the work is done when they are, and raises what they raise."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name="gloo ring", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        over, failure = threading.Event(), list[BaseException]()

        def job() -> None:
            try:
                with torch.no_grad():
                    steps()
            except BaseException as error:  # it belongs to whoever waits
                failure.append(error)
            over.set()

        def finish() -> None:
            over.wait()
            if failure:
                raise failure[0]

        self._jobs.put(job)
        return Work(finish=finish)


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while job := jobs.get():
        job()
        del job  # it holds the transport, whose end ends this thread
