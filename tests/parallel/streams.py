"""Pipelines as NCCL runs them: each rank's host issues in order, each communicator's messages run in order on its
stream of each device, and computation runs on another.

The programs are those of the real runner, taken down by a transport that only takes notes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.pipeline.runner import Pipeline
from repro.parallel.transports import NoTransport, Work

Channel = tuple[int, int, int]
"""Stage that sends, stage that receives, activations (0) or gradients (1)."""


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


Program = Sequence[Message | Wait | Compute]


class _Host(NoTransport):
    """Takes down what the host of a stage issues; messages after a `moment` as on a GPU."""

    def __init__(self, stage: int):
        self.stage, self.program = stage, list[Message | Wait | Compute]()
        self.messages, self.moment = 0, -1
        self.seen: set[tuple[int, str]] = set()

    def compute(self, chunk: int, kind: str) -> None:
        self.program.append(Compute((chunk, kind) not in self.seen))
        self.seen.add((chunk, kind))

    def _issue(self, channel: Channel) -> Work:
        number, self.messages = self.messages, self.messages + 1
        self.program.append(Message(channel, self.now() if self.moment < 0 else self.moment))
        return Work(finish=lambda: self.program.append(Wait(number)))

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        return self._issue((self.stage, to, channel))

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        return self._issue((source, self.stage, channel))

    # -- in the place of `repro.parallel.pipeline.boundary.Later`

    def now(self) -> int:
        return sum(not isinstance(line, Message) for line in self.program)

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

    def after_backward(self) -> None: ...


def programs(layout: Layout) -> list[Program]:
    """What the host of each stage issues in a step."""
    found: list[Program] = []
    for stage in range(layout.pp):
        host = _Host(stage)
        mesh = meshes.build(layout, stage, lambda ranks, host=host: host)  # type: ignore[misc]
        last = stage == layout.pp - 1
        chunks = [_Chunk(host, chunk, last and chunk == layout.chunks - 1) for chunk in range(layout.chunks)]
        pipeline = Pipeline(layout, mesh.pp, mesh.tp, chunks, (1, 1, 1), torch.empty(0))
        later: Any = host
        pipeline.boundary.later = later
        pipeline.run(None, lambda phase: None)
        found.append(host.program)
    return found


class _Rank:
    def __init__(self, program: Program):
        self.program, self.at = program, 0
        self.main: list[tuple[Hashable, int] | None] = []
        """What was issued to compute, in order: the message that is waited for, as (communicator, number), or None."""
        self.ran = 0
        self.messages: list[tuple[Hashable, int]] = []
        self.streams: dict[Hashable, list[Message]] = defaultdict(list)
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
        return queue[ended] if ended < len(queue) and queue[ended].after <= self.ran else None


class _Machine:
    def __init__(
        self, ranks: list[_Rank], connected: bool, loads: str, communicator: Callable[[Channel], Hashable]
    ):
        self.ranks, self.connected, self.loads, self.communicator = ranks, connected, loads, communicator
        self.met: dict[Hashable, set[int]] = defaultdict(set)

    def host(self, number: int) -> bool:
        """Issue a rank's next line; whether its host got past it."""
        rank = self.ranks[number]
        line = rank.program[rank.at]
        if isinstance(line, Compute):
            waits = self.loads == "always" or (self.loads == "first" and line.first)
            if waits and not rank.idle:
                return False
            rank.main.append(None)
        elif isinstance(line, Wait):
            rank.main.append(rank.messages[line.message])
        else:
            key = self.communicator(line.channel)
            self.met[key].add(number)
            if not self.connected and len(self.met[key]) < 2:
                return False
            rank.messages.append((key, len(rank.streams[key])))
            rank.streams[key].append(line)
        rank.at += 1
        return True

    def device(self, rank: _Rank) -> bool:
        """Run what the rank's device can run; whether it ran anything."""
        before = rank.ran
        while rank.ran < len(rank.main):
            awaited = rank.main[rank.ran]
            if awaited is not None and rank.ended[awaited[0]] <= awaited[1]:
                break
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
    connected: bool = True,
    loads: str = "",
    communicator: Callable[[Channel], Hashable] = lambda channel: channel,
) -> list[int]:
    """The stages that never end; none if all is well.

    Unless `connected`, the first message of a communicator has the hosts of both ends wait for each other.
    `loads`: `always` whoever issues computation first waits for all that its device was given, as when memory is
    given back; `first` only before the first of a kind, as when a kernel's code is loaded.
    """
    machine = _Machine([_Rank(program) for program in all_programs], connected, loads, communicator)
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(machine.ranks):
            while rank.at < len(rank.program) and machine.host(number):
                progress = True
            while machine.device(rank):
                progress = True
    return [n for n, rank in enumerate(machine.ranks) if rank.at < len(rank.program) or not rank.idle]
