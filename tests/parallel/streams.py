"""Model of NCCL's order of operations: a host issues in order, and each communicator has one stream on each device.

Computation runs on another stream. At the first use of a communicator, the hosts of its ranks wait for each other. The
product's mesh and pipeline runner issue the operations, on a substitute of `torch.distributed` that records them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel import transports
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Pipeline

Channel = tuple[int, int, int]
"""Sending rank, receiving rank, and activations (0) or gradients (1)."""


class Message(NamedTuple):
    """Next message of a channel; the device starts it after its first `after` computations and waits."""

    channel: Channel
    after: int


class Wait(NamedTuple):
    """Order of all later computations after the end of the host's message with this number."""

    message: int


class Compute(NamedTuple):
    """Launch of a computation."""

    is_first: bool
    """Whether this is the first launch of its kind and chunk, which may load code."""


class Rendezvous(NamedTuple):
    """First collective of a group; the host waits for the hosts of all its ranks."""

    ranks: tuple[int, ...]


class Synchronize(NamedTuple):
    """Wait of the host until its device is idle."""


Operation = Message | Wait | Compute | Rendezvous | Synchronize
Program = Sequence[Operation]


class _FakeGroup:
    """Process group. As in torch, groups of the same ranks with different purposes are distinct."""

    def __init__(self, ranks: tuple[int, ...], purpose: tuple[Any, ...] = ()):
        self.ranks, self.purpose = ranks, purpose


class _RecordingDist:
    """Substitute of `torch.distributed` and `DeferredReceives` on one rank; records the operations of the host."""

    def __init__(self, rank: int):
        self.rank, self.program = rank, list[Operation]()
        self.message_count, self.receive_after = 0, -1
        self.launched: set[tuple[int, str]] = set()
        self._groups: dict[object, _FakeGroup] = {}

    def compute(self, chunk: int, kind: str) -> None:
        self.program.append(Compute((chunk, kind) not in self.launched))
        self.launched.add((chunk, kind))

    def process_group(self, ranks: tuple[int, ...], purpose: tuple[Any, ...] = ()) -> _FakeGroup:
        return self._groups.setdefault((ranks, purpose), _FakeGroup(ranks, purpose))

    def get_rank(self, group: _FakeGroup | None = None) -> int:
        return self.rank if group is None else group.ranks.index(self.rank)

    def get_global_rank(self, group: _FakeGroup, rank: int) -> int:
        return group.ranks[rank]

    def all_reduce(self, tensor: Tensor, op: Any, group: _FakeGroup, async_op: bool) -> Any:
        self.program.append(Rendezvous(group.ranks))
        return SimpleNamespace(wait=lambda: None)

    def isend(self, tensor: Tensor, peer: int, group: _FakeGroup) -> Any:
        assert group.ranks == (self.rank, peer)
        return self._issue(group)

    def irecv(self, tensor: Tensor, peer: int, group: _FakeGroup) -> Any:
        assert group.ranks == (peer, self.rank)
        return self._issue(group)

    def _issue(self, pair: _FakeGroup) -> Any:
        number, self.message_count = self.message_count, self.message_count + 1
        after = self.record() if self.receive_after < 0 else self.receive_after
        self.program.append(Message((*pair.ranks, pair.purpose[2]), after))
        return SimpleNamespace(wait=lambda: self.program.append(Wait(number)))

    def record(self) -> int:
        return sum(isinstance(operation, Wait | Compute) for operation in self.program)

    @contextmanager
    def after(self, moment: int) -> Iterator[None]:
        self.receive_after = moment
        yield
        self.receive_after = -1


class _Chunk:
    """Model chunk with a single weight, whose launches are recorded."""

    def __init__(self, host: _RecordingDist, chunk: int, is_last: bool):
        self.host, self.chunk, self.is_last = host, chunk, is_last
        self.weight = torch.ones(1, 1, 1, requires_grad=True)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        self.host.compute(self.chunk, "F")
        y = self.weight * (1.0 if x is None else x)
        return y.sum() if self.is_last else y

    def before_backward(self, micro_batch: int, micro_batches: int) -> None:
        self.host.compute(self.chunk, "B")

    def after_backward(self) -> None:
        self.host.compute(self.chunk, "reduce")


@contextmanager
def _recording_mesh(layout: Layout, rank: int, connect: bool) -> Iterator[tuple[_RecordingDist, Mesh]]:
    host = _RecordingDist(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "dist", host)
        patch.setattr(meshes, "make_process_group", host.process_group)
        patch.setattr(transports, "dist", host)
        patch.setattr(meshes, "non_torch_bytes", lambda device: host.program.append(Synchronize()) or 0)
        mesh = meshes.distributed_mesh(layout, "cuda")
        if connect:
            meshes.connect_communicators(mesh, torch.device("cpu"))
        yield host, mesh


def connect_programs(layout: Layout) -> list[Program]:
    """Return the operations by which each rank's host connects its groups."""
    programs: list[Program] = []
    for rank in range(layout.world):
        with _recording_mesh(layout, rank, True) as (host, _):
            programs.append(host.program)
    return programs


def step_programs(layout: Layout, *, connect: bool = True) -> list[Program]:
    """Return each stage's operations in a step of a layout with only pp > 1, after those that connect its groups."""
    programs: list[Program] = []
    for stage in range(layout.pp):
        with _recording_mesh(layout, stage, connect) as (host, mesh):
            last = layout.chunks - 1 if stage == layout.pp - 1 else -1
            chunks = [_Chunk(host, chunk, chunk == last) for chunk in range(layout.chunks)]
            pipeline = Pipeline(layout, mesh.pp, mesh.tp, chunks, (1, 1, 1), torch.empty(0))
            pipeline.boundary.later = host  # type: ignore[assignment]
            pipeline.run(None, lambda phase: None)
        programs.append(host.program)
    return programs


_MessageCounts = tuple[tuple[Hashable, int], ...]
"""Communicators, and the number of messages of each that have to end."""


class _Rank:
    def __init__(self, program: Program):
        self.program, self.position = program, 0
        self.computations: list[_MessageCounts] = []
        """Prerequisites of each computation or wait, in the order of issue."""
        self.computed = 0
        self.messages: list[tuple[Hashable, int]] = []
        self.streams: dict[Hashable, list[tuple[Message, _MessageCounts]]] = defaultdict(list)
        """Messages of each communicator, with prerequisites in addition to `Message.after`."""
        self.ended: dict[Hashable, int] = defaultdict(int)

    @property
    def is_idle(self) -> bool:
        """Return whether the device has finished all issued operations."""
        all_ended = all(self.ended[key] == len(queue) for key, queue in self.streams.items())
        return all_ended and self.computed == len(self.computations)

    def next_message(self, key: Hashable) -> Message | None:
        """Return the communicator's next message; None before all its prerequisites have ended."""
        if self.ended[key] == len(self.streams[key]):
            return None
        message, counts = self.streams[key][self.ended[key]]
        return message if message.after <= self.computed and self.have_ended(counts) else None

    def have_ended(self, counts: _MessageCounts) -> bool:
        return all(self.ended[key] >= count for key, count in counts)


class _Cluster:
    def __init__(
        self, ranks: list[_Rank], blocking: str, one_queue: bool, communicator: Callable[[Channel], Hashable]
    ):
        self.ranks, self.blocking, self.communicator = ranks, blocking, communicator
        self.one_queue = one_queue
        self.arrived: dict[Hashable, set[int]] = defaultdict(set)

    def issue_next(self, number: int) -> bool:
        """Issue the next operation of a rank, and return False if the operation blocks the rank's host."""
        rank = self.ranks[number]
        operation = rank.program[rank.position]
        preceding: _MessageCounts = ()
        if (
            self.one_queue
        ):  # all earlier messages have started if those before the last of each stream have ended
            preceding = tuple((key, len(queue) - 1) for key, queue in rank.streams.items())
        if isinstance(operation, Compute):
            waits = self.blocking == "always" or (self.blocking == "first" and operation.is_first)
            if waits and not rank.is_idle:
                return False
            rank.computations.append(preceding)
        elif isinstance(operation, Wait):
            rank.computations.append((rank.messages[operation.message], *preceding))
        elif isinstance(operation, Synchronize):
            if not rank.is_idle:
                return False
        elif isinstance(operation, Rendezvous):
            if not self._have_arrived(operation.ranks, number, len(operation.ranks)):
                return False
        else:
            key = self.communicator(operation.channel)
            if not self._have_arrived(key, number, 2):
                return False
            after = len(rank.computations) if self.one_queue else operation.after
            rank.streams[key].append((operation._replace(after=after), preceding))
            rank.messages.append((key, len(rank.streams[key])))
        rank.position += 1
        return True

    def _have_arrived(self, key: Hashable, number: int, hosts: int) -> bool:
        """Record that a rank's host uses a communicator, and return whether all its hosts have done so."""
        self.arrived[key].add(number)
        return len(self.arrived[key]) == hosts

    def run_device(self, rank: _Rank) -> bool:
        """Run the operations of the rank's device that can start, and return whether there were any."""
        before = rank.computed
        while rank.computed < len(rank.computations) and rank.have_ended(rank.computations[rank.computed]):
            rank.computed += 1
        transferred = [self._transfer(rank, key) for key in list(rank.streams)]
        return rank.computed > before or any(transferred)

    def _transfer(self, rank: _Rank, key: Hashable) -> bool:
        """Transfer the communicator's next message if both ranks issued it next, and return whether they did."""
        message = rank.next_message(key)
        if message is None:
            return False
        ends = [self.ranks[end] for end in message.channel[:2]]
        both = [end.next_message(key) for end in ends]
        if any(other is None or other.channel != message.channel for other in both):
            return False
        for end in ends:
            end.ended[key] += 1
        return True


def deadlocked_ranks(
    programs: Sequence[Program],
    *,
    blocking: str = "",
    one_queue: bool = False,
    communicator: Callable[[Channel], Hashable] = lambda channel: channel,
) -> list[int]:
    """Return the ranks that never finish their programs.

    `blocking`: launches before which the host waits until its device is idle. `always`: all, as when memory is freed;
    `first`: the first launch of each kind, as when a kernel's code is loaded.
    `one_queue`: the device starts operations of all streams in order of issue (`CUDA_DEVICE_MAX_CONNECTIONS=1`).
    """
    ranks = [_Rank(program) for program in programs]
    cluster = _Cluster(ranks, blocking, one_queue, communicator)
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(ranks):
            while rank.position < len(rank.program) and cluster.issue_next(number):
                progress = True
            while cluster.run_device(rank):
                progress = True
    return [n for n, rank in enumerate(ranks) if rank.position < len(rank.program) or not rank.is_idle]
