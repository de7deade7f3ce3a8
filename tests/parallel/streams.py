"""Ranks as NCCL runs them: each rank's host issues in order, each communicator's messages run in order on its stream of
each device, and computation runs on another.  At a communicator's first use the hosts of its ranks wait for each other.

The programs are those of the real mesh, its connecting and the real runner, on a `torch.distributed` that takes notes.
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
"""Rank that sends, rank that receives, activations (0) or gradients (1)."""


class Message(NamedTuple):
    """The host issues its end of a channel's next message, after its first `after` computations and waits."""

    channel: Channel
    after: int


class Wait(NamedTuple):
    """What is computed from here on comes after the end of the host's n-th message."""

    message: int


class Compute(NamedTuple):
    """The host issues computation."""

    first: bool
    """Of its kind and chunk: code may have to be loaded."""


class Meet(NamedTuple):
    """The host issues the first collective of these ranks."""

    ranks: tuple[int, ...]


class Synchronize(NamedTuple):
    """The host waits for all that its device was given."""


Line = Message | Wait | Compute | Meet | Synchronize
Program = Sequence[Line]


class _Made:
    """A process group.  As in torch, two of the same ranks are two."""

    def __init__(self, ranks: tuple[int, ...], purpose: tuple[Any, ...] = ()):
        self.ranks, self.purpose = ranks, purpose


class _Host:
    """`torch.distributed` on one rank: takes down what its host issues; messages after a `moment` as on a GPU."""

    def __init__(self, rank: int):
        self.rank, self.program = rank, list[Line]()
        self.messages, self.moment = 0, -1
        self.seen: set[tuple[int, str]] = set()
        self._groups: dict[object, _Made] = {}

    def compute(self, chunk: int, kind: str) -> None:
        self.program.append(Compute((chunk, kind) not in self.seen))
        self.seen.add((chunk, kind))

    # -- in the place of `repro.parallel.mesh.make_process_group` and `torch.distributed`

    def process_group(self, ranks: tuple[int, ...], purpose: tuple[Any, ...] = ()) -> _Made:
        return self._groups.setdefault((ranks, purpose), _Made(ranks, purpose))

    def get_rank(self, group: _Made | None = None) -> int:
        return self.rank if group is None else group.ranks.index(self.rank)

    def get_global_rank(self, group: _Made, rank: int) -> int:
        return group.ranks[rank]

    def all_reduce(self, tensor: Tensor, op: Any, group: _Made, async_op: bool) -> Any:
        self.program.append(Meet(group.ranks))
        return SimpleNamespace(wait=lambda: None)

    def isend(self, tensor: Tensor, peer: int, group: _Made) -> Any:
        assert group.ranks == (self.rank, peer)
        return self._issue(group)

    def irecv(self, tensor: Tensor, peer: int, group: _Made) -> Any:
        assert group.ranks == (peer, self.rank)
        return self._issue(group)

    def _issue(self, pair: _Made) -> Any:
        number, self.messages = self.messages, self.messages + 1
        after = self.record() if self.moment < 0 else self.moment
        self.program.append(Message((*pair.ranks, pair.purpose[2]), after))
        return SimpleNamespace(wait=lambda: self.program.append(Wait(number)))

    # -- in the place of `repro.parallel.pipeline.boundary.DeferredReceives`

    def record(self) -> int:
        return sum(isinstance(line, Wait | Compute) for line in self.program)

    @contextmanager
    def after(self, moment: int) -> Iterator[None]:
        self.moment = moment
        yield
        self.moment = -1


class _Chunk:
    """Computes next to nothing."""

    def __init__(self, host: _Host, chunk: int, last: bool):
        self.host, self.chunk, self.last = host, chunk, last
        self.weight = torch.ones(1, 1, 1, requires_grad=True)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        self.host.compute(self.chunk, "F")
        y = self.weight * (1.0 if x is None else x)
        return y.sum() if self.last else y

    def before_backward(self, micro_batch: int, micro_batches: int) -> None:
        self.host.compute(self.chunk, "B")

    def after_backward(self) -> None:
        self.host.compute(self.chunk, "reduce")


@contextmanager
def _started(layout: Layout, rank: int, connect: bool) -> Iterator[tuple[_Host, Mesh]]:
    host = _Host(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "dist", host)
        patch.setattr(meshes, "make_process_group", host.process_group)
        patch.setattr(transports, "dist", host)
        patch.setattr(meshes, "non_torch_bytes", lambda device: host.program.append(Synchronize()) or 0)
        mesh = meshes.distributed_mesh(layout, "cuda")
        if connect:
            meshes.connect_communicators(mesh, torch.device("cpu"))
        yield host, mesh


def starts(layout: Layout) -> list[Program]:
    """What the host of each rank of the layout issues to connect its groups."""
    found: list[Program] = []
    for rank in range(layout.world):
        with _started(layout, rank, True) as (host, _):
            found.append(host.program)
    return found


def programs(layout: Layout, *, connect: bool = True) -> list[Program]:
    """What the host of each stage issues to connect its groups (`connect`), and in a step.  Of a layout that is pp."""
    found: list[Program] = []
    for stage in range(layout.pp):
        with _started(layout, stage, connect) as (host, mesh):
            last = stage == layout.pp - 1
            chunks = [
                _Chunk(host, chunk, last and chunk == layout.chunks - 1) for chunk in range(layout.chunks)
            ]
            pipeline = Pipeline(layout, mesh.pp, mesh.tp, chunks, (1, 1, 1), torch.empty(0))
            later: Any = host
            pipeline.boundary.later = later
            pipeline.run(None, lambda phase: None)
        found.append(host.program)
    return found


_Ended = tuple[Hashable, int]
"""A communicator and how many of its messages."""


class _Rank:
    def __init__(self, program: Program):
        self.program, self.at = program, 0
        self.main: list[tuple[_Ended, ...]] = []
        """What was issued to compute, in order: what each waits for."""
        self.ran = 0
        self.messages: list[_Ended] = []
        self.streams: dict[Hashable, list[Message]] = defaultdict(list)
        self.behind: dict[Hashable, list[tuple[_Ended, ...]]] = defaultdict(list)
        """What each message of a stream waits for besides."""
        self.ended: dict[Hashable, int] = defaultdict(int)

    @property
    def idle(self) -> bool:
        """Whether the device has done all that it was given."""
        return self.ran == len(self.main) and all(
            self.ended[key] == len(queue) for key, queue in self.streams.items()
        )

    def head(self, key: Hashable) -> Message | None:
        """The communicator's next message, if all that it comes after has run."""
        queue, ended = self.streams[key], self.ended[key]
        if ended == len(queue) or queue[ended].after > self.ran or not self.over(self.behind[key][ended]):
            return None
        return queue[ended]

    def over(self, awaited: tuple[_Ended, ...]) -> bool:
        """Whether all of these messages have come."""
        return all(self.ended[key] >= count for key, count in awaited)

    def before_in_queue(self) -> tuple[_Ended, ...]:
        """What must be over for all that was issued to have begun, each message after the one before it."""
        return tuple((key, len(queue) - 1) for key, queue in self.streams.items())


class _Machine:
    def __init__(
        self, ranks: list[_Rank], loads: str, one_queue: bool, communicator: Callable[[Channel], Hashable]
    ):
        self.ranks, self.loads, self.communicator = ranks, loads, communicator
        self.one_queue = one_queue
        self.met: dict[Hashable, set[int]] = defaultdict(set)

    def host(self, number: int) -> bool:
        """Issue a rank's next line; whether its host got past it."""
        rank = self.ranks[number]
        line = rank.program[rank.at]
        behind = rank.before_in_queue() if self.one_queue else ()
        if isinstance(line, Compute):
            waits = self.loads == "always" or (self.loads == "first" and line.first)
            if waits and not rank.idle:
                return False
            rank.main.append(behind)
        elif isinstance(line, Wait):
            rank.main.append((rank.messages[line.message], *behind))
        elif isinstance(line, Synchronize):
            if not rank.idle:
                return False
        elif isinstance(line, Meet):
            self.met[line.ranks].add(number)
            if len(self.met[line.ranks]) < len(line.ranks):
                return False
        else:
            key = self.communicator(line.channel)
            self.met[key].add(number)
            if len(self.met[key]) < 2:
                return False
            after = len(rank.main) if self.one_queue else line.after
            rank.streams[key].append(line._replace(after=after))
            rank.behind[key].append(behind)
            rank.messages.append((key, len(rank.streams[key])))
        rank.at += 1
        return True

    def device(self, rank: _Rank) -> bool:
        """Run what the rank's device can run; whether it ran anything."""
        before = rank.ran
        while rank.ran < len(rank.main) and rank.over(rank.main[rank.ran]):
            rank.ran += 1
        carried = [self._message(rank, key) for key in list(rank.streams)]
        return rank.ran > before or any(carried)

    def _message(self, rank: _Rank, key: Hashable) -> bool:
        """Carry the communicator's next message, if it is the next one at both ends."""
        message = rank.head(key)
        if message is None:
            return False
        ends = [self.ranks[message.channel[0]], self.ranks[message.channel[1]]]
        heads = [end.head(key) for end in ends]
        if any(head is None or head.channel != message.channel for head in heads):
            return False
        for end in ends:
            end.ended[key] += 1
        return True


def stuck(
    all_programs: Sequence[Program],
    *,
    loads: str = "",
    one_queue: bool = False,
    communicator: Callable[[Channel], Hashable] = lambda channel: channel,
) -> list[int]:
    """The stages that never end; none if all is well.

    `loads`: `always` whoever issues computation first waits for all that its device was given, as when memory is
    given back; `first` only before the first of a kind, as when a kernel's code is loaded.
    `one_queue`: a device takes everything in the order in which it was issued, whatever the stream, and begins nothing
    before it has begun what comes before (`CUDA_DEVICE_MAX_CONNECTIONS=1`).
    """
    machine = _Machine([_Rank(program) for program in all_programs], loads, one_queue, communicator)
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(machine.ranks):
            while rank.at < len(rank.program) and machine.host(number):
                progress = True
            while machine.device(rank):
                progress = True
    return [n for n, rank in enumerate(machine.ranks) if rank.at < len(rank.program) or not rank.idle]
