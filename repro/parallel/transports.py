"""Transports of collectives and messages: gloo, gloo rings over nodes, NCCL, or none (one rank, tensors on `meta`)."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from repro.config.enums import Category
from repro.parallel.storage import empty

SUM, MAX = "sum", "max"


class Work:
    """Handle of a running collective or message. After `wait()`, code (on CUDA: later operators) may use the result."""

    __slots__ = ("_finish", "_held", "_works")

    def __init__(self, *works: dist.Work | None, finish: Callable[[], object] | None = None):
        """Wrap handles `works` of `torch.distributed`. `finish`: function that the first `wait` calls at its end."""
        assert None not in works
        self._works: Any = works
        self._finish = finish
        self._held: Tensor | None = None

    def hold(self, tensor: Tensor) -> Work:
        """Retain, until `wait`, a tensor that the running collective reads; return this handle."""
        self._held = tensor
        return self

    def wait(self) -> None:
        """Block until the collective ends (CPU), or make the current stream wait (CUDA); later calls do nothing."""
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        self._works = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._held = None


class Transport(Protocol):
    """Interface that transmits contiguous tensors between the ranks of one group; `Group` checks the sizes."""

    @property
    def reduces_in_place(self) -> bool:
        """Return whether a reduce-scatter needs no memory in addition to its input and output."""

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """All-reduce `tensor` in place over all ranks of the group."""

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        """Reduce-scatter `input` [n * k] of n ranks to `output` [k], which may be a view of `input`."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """All-gather `input` [k] of n ranks to `output` [n * k]; `input` may be this rank's part of `output`."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Broadcast `tensor` in place from the group's rank `source` to all ranks of the group."""

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        """Send `tensor` to the group's rank `to`; messages of one channel arrive in the order of sending."""

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        """Receive into `tensor` the next message of a channel from the group's rank `source`."""

    def barrier(self) -> None:
        """Block until all ranks of the group have called `barrier`."""


Channels = dict[tuple[int, int, int], dist.ProcessGroup]
"""Process groups for messages between pipeline stages, by (sending stage, receiving stage, channel number)."""


class NoTransport:
    """Transport that sends nothing, for a group of one rank, or for tensors without data (`meta`)."""

    reduces_in_place = True

    def _nothing(self, *_: Any, **__: Any) -> Work:
        """Return the handle of a finished operation: with one rank or without data, the tensor needs no change."""
        return Work()

    all_reduce = broadcast = send = receive = _nothing

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        output.copy_(input[: output.numel()])
        return Work()

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        output[: input.numel()].copy_(input)
        return Work()

    def barrier(self) -> None:
        return None


class NcclTransport:
    """Transport of CUDA tensors through NCCL."""

    reduces_in_place = True
    OPS: ClassVar = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}

    def __init__(self, group: dist.ProcessGroup, channels: Channels | None = None):
        self.group, self.channels = group, channels or {}

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        return Work(dist.all_reduce(tensor, self.OPS[op], group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return Work(dist.reduce_scatter_tensor(output, input, group=self.group, async_op=True))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return Work(dist.all_gather_into_tensor(output, input, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        root = dist.get_global_rank(self.group, source)
        return Work(dist.broadcast(tensor, root, group=self.group, async_op=True))

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        pair = self.channels[dist.get_rank(self.group), to, channel]
        return Work(dist.isend(tensor, dist.get_global_rank(self.group, to), group=pair))

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        pair = self.channels[source, dist.get_rank(self.group), channel]
        return Work(dist.irecv(tensor, dist.get_global_rank(self.group, source), group=pair))

    def barrier(self) -> None:
        # Without `device_ids`, torch's barrier uses the GPU whose index is the rank.
        dist.barrier(group=self.group, device_ids=[torch.cuda.current_device()])

    def first_uses(self) -> Iterator[tuple[dist.ProcessGroup, Callable[[Tensor], Work]]]:
        """Yield each NCCL communicator of this rank with a function that uses it, in equal order on all ranks."""
        yield self.group, lambda message: self.all_reduce(message, SUM)
        rank = dist.get_rank(self.group)
        for (source, to, channel), pair in self.channels.items():
            if rank == source:
                yield pair, partial(self.send, to=to, channel=channel)
            elif rank == to:
                yield pair, partial(self.receive, source=source, channel=channel)


class GlooTransport:
    """Transport of CPU tensors through gloo, with direct messages for reduce-scatter and all-gather.

    gloo's reduce-scatter costs as much as its all-reduce, and its all-gather copies everything twice. Direct messages
    between ranks move the same `(n-1)/n` of the payload in half to three quarters of the time. Sums are in fp32.
    """

    reduces_in_place = False

    def __init__(self, group: dist.ProcessGroup, channel: int = 0):
        """Create the group's transport. `channel`: tag number of its collectives; other channels' tags never match."""
        self.group, self.channel = group, channel
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._global = [dist.get_global_rank(group, r) for r in range(self.size)]
        self._tag = 0
        self._messages: Counter[tuple[str, int, int]] = Counter()

    def _peers(self) -> list[tuple[int, int]]:
        """Return (rank to send to, rank to receive from) for each of the n - 1 rounds of an exchange among n ranks."""
        n, r = self.size, self.rank
        return [((r + k) % n, (r - k) % n) for k in range(1, n)]

    def _next_tag(self) -> int:
        """Return the next collective's tag, which is equal on all ranks because they start collectives in one order."""
        self._tag = (self._tag + 1) % (1 << 16)
        return (self.channel << 16) + self._tag

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[dist.Work | None]:
        """Start a collective's sends (tensor, target rank) and receives (tensor, source rank); return their handles."""
        tag = self._next_tag()
        coming = [dist.irecv(x, self._global[rank], group=self.group, tag=tag) for x, rank in receives]
        return coming + [dist.isend(x, self._global[rank], group=self.group, tag=tag) for x, rank in sends]

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        kind = dist.ReduceOp.MAX if op == MAX else dist.ReduceOp.SUM
        return Work(dist.all_reduce(tensor, kind, group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        parts = input.chunk(self.size)
        received = empty(input.numel() - output.numel(), input, Category.COMMUNICATION).chunk(self.size - 1)
        peers = self._peers()
        works = self._exchange(
            [(parts[to], to) for to, _ in peers],
            [(buffer, source) for buffer, (_, source) in zip(received, peers, strict=True)],
        )

        def finish() -> None:
            if self.size == 2:
                torch.add(parts[self.rank], received[0], out=output)
                return
            total = parts[self.rank].float() if output.itemsize < 4 else parts[self.rank].clone()
            for buffer in received:
                total += buffer
            output.copy_(total)

        return Work(*works, finish=finish)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        parts = output.chunk(self.size)
        peers = self._peers()
        works = self._exchange(
            [(input, to) for to, _ in peers], [(parts[source], source) for _, source in peers]
        )
        if parts[self.rank].data_ptr() != input.data_ptr():
            parts[self.rank].copy_(input)
        return Work(*works)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        root = self._global[source]
        return Work(dist.broadcast(tensor, root, group=self.group, async_op=True))

    def _message_tag(self, direction: str, peer: int, channel: int) -> int:
        """Return the tag (2^16 or more) of a channel's next message, which is equal on sender and receiver."""
        key = (direction, peer, channel)
        self._messages[key] += 1
        return (1 + channel << 16) + self._messages[key] % (1 << 16)

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        tag = self._message_tag("send", to, channel)
        return Work(dist.isend(tensor, self._global[to], group=self.group, tag=tag))

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        tag = self._message_tag("receive", source, channel)
        return Work(dist.irecv(tensor, self._global[source], group=self.group, tag=tag))

    def barrier(self) -> None:
        dist.barrier(group=self.group)


RingOperation = Callable[[], None]


def needs_ring(ranks: Sequence[int], per_node: int) -> bool:
    """Return whether `ranks` are on several nodes, with several ranks on one node. `per_node`: ranks per node."""
    nodes = [rank // per_node for rank in ranks]
    return 1 < len(set(nodes)) < len(nodes)


def ranks_per_node(world: int) -> int:
    """Return the ranks per node from `LOCAL_WORLD_SIZE`. Without this variable, all ranks are on one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class GlooRing(GlooTransport):
    """gloo transport with rings, for groups that have several ranks on each of several nodes.

    With `GlooTransport` a part of a tensor crosses the link between two nodes once per rank of the target node. In a
    ring a part enters and leaves each node once, as in NCCL's rings and in gloo's all-reduce. The reduce-scatter runs
    in a thread, so that it overlaps with computation.
    """

    def __init__(self, group: dist.ProcessGroup, channel: int = 0):
        super().__init__(group, channel)
        self._jobs: queue.SimpleQueue[RingOperation | None] | None = None

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        parts, tag = input.chunk(self.size), self._next_tag()
        received = empty(input.numel() - output.numel(), input, Category.COMMUNICATION).chunk(self.size - 1)
        following, previous = (self._global[(self.rank + by) % self.size] for by in (1, -1))

        def steps() -> None:
            # Post all receives of the ring first, because posting one per ring step costs context switches.
            coming = [Work(dist.irecv(part, previous, group=self.group, tag=tag)) for part in received]
            sums, going = parts[self.rank - 1], []
            for step, (part, arrival) in enumerate(zip(received, coming, strict=True)):
                going.append(dist.isend(sums, following, group=self.group, tag=tag))
                arrival.wait()
                sums = part.add_(parts[self.rank - step - 2])
            Work(*going).wait()
            output.copy_(sums)

        return self._run_in_thread(steps)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """All-gather `input` of all ranks to `output` by gloo's all-gather, which uses a ring."""
        parts = list(output.chunk(self.size))
        return Work(dist.all_gather(parts, input, group=self.group, async_op=True))

    def _run_in_thread(self, steps: RingOperation) -> Work:
        """Queue the function `steps` for the thread of ring collectives; `Work.wait` awaits it and raises its error."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name="gloo ring", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        ended: Future[None] = Future()

        def job() -> None:
            try:
                with torch.no_grad():
                    steps()
                ended.set_result(None)
            except BaseException as error:  # The caller's `Work.wait` raises this exception.
                ended.set_exception(error)

        self._jobs.put(job)
        return Work(finish=ended.result)


def _run(jobs: queue.SimpleQueue[RingOperation | None]) -> None:
    while job := jobs.get():
        job()
        # The finished operation references its transport. The thread ends only when the transport is freed.
        del job
