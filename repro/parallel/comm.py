"""Every collective of the suite: groups of ranks, and the transports that carry their messages.

Nothing else calls ``torch.distributed`` to communicate.  A :class:`Group` counts, a :class:`Transport`
carries: gloo and NCCL through torch, or nothing at all (one rank; shapes only on ``meta`` tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from repro.parallel.ledger import Ledger
from repro.parallel.storage import COMMUNICATION, empty

SUM, MAX, AVERAGE = "sum", "max", "average"


class Work:
    """A collective under way.  ``wait()`` returns when its result may be used (on CUDA: enqueued after)."""

    __slots__ = ("_finish", "_works")

    def __init__(self, *works: dist.Work, finish: Callable[[], None] | None = None):
        self._works: tuple[dist.Work, ...] | None = works
        self._finish = finish

    def wait(self) -> None:
        """Block (CPU) or order the current stream after the collective (CUDA).  A second call does nothing."""
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        self._works = None
        if self._finish is not None:
            self._finish()
            self._finish = None


class Transport(Protocol):
    """Carries messages between the ranks of one group.  Tensors are contiguous; sizes were checked."""

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """Reduce in place over all ranks."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> Work:
        """Reduce ``input`` [n * k], leave the rank's part in ``output`` [k], which may be a view of it."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Concatenate every rank's ``input`` [k] in ``output`` [n * k]; ``input`` may be its part of it."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy in place from the group's rank ``source``."""

    def barrier(self) -> None:
        """Return when all ranks have arrived."""


class NoTransport:
    """Carries nothing: a group of one rank, or tensors that have shapes but no data."""

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        return Work()

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> Work:
        output.copy_(input[: output.numel()])
        return Work()

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        output[: input.numel()].copy_(input)
        return Work()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Work()

    def barrier(self) -> None:
        return None


class NcclTransport:
    """CUDA tensors through NCCL."""

    OPS: ClassVar = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX, AVERAGE: dist.ReduceOp.AVG}

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        return Work(dist.all_reduce(tensor, self.OPS[op], group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> Work:
        work = dist.reduce_scatter_tensor(output, input, self.OPS[op], group=self.group, async_op=True)
        return Work(work)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return Work(dist.all_gather_into_tensor(output, input, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        root = dist.get_global_rank(self.group, source)
        return Work(dist.broadcast(tensor, root, group=self.group, async_op=True))

    def barrier(self) -> None:
        dist.barrier(group=self.group)


def _divide(tensor: Tensor, by: int) -> None:
    tensor.div_(by)


class GlooTransport:
    """CPU tensors through gloo.

    gloo's own reduce-scatter costs as much as its all-reduce.  An all-to-all moves the same
    ``(n-1)/n`` of the message in half the time; the rank then adds the n parts, in rank order and in
    fp32, so that every rank gets the same bits whatever the sizes of buckets.
    """

    SMALL = 1 << 14
    """Elements under which latency rules and one all-reduce beats all-to-all plus all-gather."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        if op == MAX or tensor.numel() < self.SMALL or tensor.numel() % self.size:
            kind = dist.ReduceOp.MAX if op == MAX else dist.ReduceOp.SUM
            work = dist.all_reduce(tensor, kind, group=self.group, async_op=True)
            return Work(work, finish=partial(_divide, tensor, self.size) if op == AVERAGE else None)
        flat = tensor.view(-1)
        part = flat.chunk(self.size)[self.rank]
        scatter = self.reduce_scatter(part, flat, op)

        def finish() -> None:
            scatter.wait()
            self.all_gather(flat, part).wait()

        return Work(finish=finish)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> Work:
        parts = empty(input.numel(), input, COMMUNICATION)
        work = dist.all_to_all_single(parts, input, group=self.group, async_op=True)

        def finish() -> None:
            table = parts.view(self.size, -1)
            if op == MAX:
                torch.amax(table, 0, out=output)
            elif self.size == 2:
                torch.add(table[0], table[1], out=output)
            else:
                torch.sum(table, 0, out=output)
            if op == AVERAGE:
                output.div_(self.size)

        return Work(work, finish=finish)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        parts = list(output.chunk(self.size))
        return Work(dist.all_gather(parts, input, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        root = dist.get_global_rank(self.group, source)
        return Work(dist.broadcast(tensor, root, group=self.group, async_op=True))

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class Group:
    """An ordered set of ranks that communicate, as one of them sees it."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, transport: Transport, ledger: Ledger):
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self.rank = ranks.index(rank)
        """Index of this rank within the group."""
        self.transport: Transport = transport if self.size > 1 else NoTransport()
        self.ledger = ledger

    def __repr__(self) -> str:
        return f"Group({self.name}: rank {self.rank} of {self.size})"

    def _count(self, op: str, message: Tensor, purpose: str) -> None:
        if self.size > 1:
            payload = message.numel() * message.element_size()
            self.ledger.count(op, self.name, self.size, payload, purpose)

    def all_reduce(self, tensor: Tensor, op: str = SUM, purpose: str = "") -> Work:
        """Reduce ``tensor`` (contiguous, any shape) in place over the group."""
        self._count("all_reduce", tensor, purpose)
        return self.transport.all_reduce(tensor, op)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = SUM, purpose: str = "") -> Work:
        """Reduce flat ``input`` [n * k]; the rank's part comes in ``output`` [k], possibly a view of it."""
        assert input.numel() == output.numel() * self.size
        self._count("reduce_scatter", input, purpose)
        return self.transport.reduce_scatter(output, input, op)

    def all_gather(self, output: Tensor, input: Tensor, purpose: str = "") -> Work:
        """Concatenate the ranks' flat ``input`` [k] in ``output`` [n * k]; ``input`` may be a part of it."""
        assert output.numel() == input.numel() * self.size
        self._count("all_gather", output, purpose)
        return self.transport.all_gather(output, input)

    def broadcast(self, tensor: Tensor, source: int = 0, purpose: str = "") -> Work:
        """Copy ``tensor`` in place from the group's rank ``source``."""
        self._count("broadcast", tensor, purpose)
        return self.transport.broadcast(tensor, source)

    def barrier(self) -> None:
        """Return when all ranks of the group have arrived; not counted, since no step uses it."""
        self.transport.barrier()
