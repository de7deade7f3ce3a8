"""What crosses the boundary between two pipeline stages: activations one way, their gradients the other.

With overlap a tensor is received while the action before is computed, and sent while the next one is.  Without, stages
exchange what is made and what is needed next in batches, and compute nothing meanwhile (`schedule.batches`).

With `split` (Megatron's scatter/gather optimisation, 2104.04473 sec. 4.1) each tp rank sends 1/t of the
tensor, which all of them hold, to its counterpart, and the receivers all-gather it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import Layout
from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work
from repro.parallel.pipeline.schedule import FORWARD


def exchanges(layout: Layout) -> bool:
    """Whether messages go in batches while nothing is computed, as in software without overlap."""
    return layout.pp > 1 and not layout.overlap


class _Expected(NamedTuple):
    """A tensor that will be received."""

    buffer: Tensor
    source: int
    kind: str
    free: torch.cuda.Event | None
    """When nothing computes with what the buffer's memory held before; on a CPU that is now."""


class DeferredReceives:
    """Receives on a GPU that are posted after what is computed meanwhile has been issued, and do not wait for it.

    A receive occupies the device until its message comes.  Issuing computation may wait for the device, to load a
    kernel's code or to give memory back: for ever, if the message needs what is being issued.

    One case is left: interleaved stages that overlap, with m > p, where not a first use but all computation waits, as
    under `CUDA_LAUNCH_BLOCKING=1`, or where memory is given back in every action.  What a stage sends to another chunk
    lies there until p micro-batches later, and meanwhile its device is never idle.  Receives that are posted further
    ahead make more cases of it, not fewer.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def record(self) -> torch.cuda.Event:
        """Return an event after everything that has been issued so far."""
        return torch.cuda.current_stream().record_event()

    @contextmanager
    def after(self, moment: torch.cuda.Event) -> Iterator[None]:
        """What is posted here waits for that moment, and for nothing that was issued since."""
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield


class Boundary:
    """The wires of one rank.  Tensors are [b, s, h] (`shape`), in `like`'s dtype and on its device."""

    UNDER_WAY = 2
    """Messages of one kind to one rank that may be under way; each holds its tensor (`Work.hold`)."""
    PURPOSE = ("activations", "gradients")

    def __init__(
        self,
        pp: Group,
        tp: Group,
        shape: tuple[int, int, int],
        like: Tensor,
        *,
        split: bool,
        overlap: bool = True,
    ):
        """`split`: over several tp ranks."""
        self.pp, self.tp, self.shape, self.overlap = pp, tp, shape, overlap
        self.split, self._like = split, like
        self.later = DeferredReceives() if like.is_cuda else None
        self._expected: deque[_Expected] = deque()
        self._posted: deque[tuple[Tensor, Work]] = deque()
        self._made: list[Callable[[], Work]] = []
        """Begin to send what the next batch takes along."""
        self._sent: dict[tuple[int, int], deque[Work]] = {}

    @staticmethod
    def channel(kind: str) -> int:
        """Activations and gradients between the same two ranks are two streams of messages."""
        return 0 if kind == FORWARD else 1

    def _buffer(self, parts: int) -> Tensor:
        return storage.empty(torch.Size(self.shape).numel() // parts, self._like, Category.COMMUNICATION)

    def expect(self, source: int, kind: str) -> None:
        """Make room for the next tensor of `kind` from stage `source`; with overlap a CPU begins to receive it."""
        buffer = self._buffer(self.tp.size if self.split else 1)
        self._expected.append(_Expected(buffer, source, kind, self.later.record() if self.later else None))
        if self.overlap and self.later is None:
            self.post()

    def post(self) -> None:
        """Begin to receive what is expected, if that has not begun: what is computed meanwhile has been issued."""
        while self._expected:
            buffer, source, kind, free = self._expected.popleft()
            if self.later is None or free is None:
                work = self.pp.receive(buffer, source, self.channel(kind))
            else:
                with self.later.after(free):
                    work = self.pp.receive(buffer, source, self.channel(kind))
            self._posted.append((buffer, work))

    def exchange(self) -> None:
        """Without overlap: send what was made, receive what is expected, and wait until all of it is there."""
        self.post()
        works = [send() for send in self._made]
        self._made.clear()
        for work in (*works, *(work for _, work in self._posted)):
            work.wait()

    def receive(self) -> Tensor:
        """The tensor that was expected first, [b, s, h]."""
        buffer, work = self._posted.popleft()
        work.wait()
        if self.split:
            gathered = self._buffer(1)
            self.tp.all_gather(gathered, buffer, purpose="boundary").wait()
            buffer = gathered
        # From here on it is an activation like any other, or the gradient of one.
        return storage.mark(buffer, Category.ACTIVATIONS).view(self.shape)

    def send(self, tensor: Tensor, to: int, kind: str) -> None:
        """Begin to send `tensor` [b, s, h] to stage `to`; without overlap, with the next batch."""
        flat = tensor.contiguous().view(-1)
        if self.split:
            flat = flat.chunk(self.tp.size)[self.tp.rank].clone()
        channel = self.channel(kind)
        message = self.pp.message(flat, to, channel, self.PURPOSE[channel])
        if not self.overlap:
            self._made.append(message)
            return
        under_way = self._sent.setdefault((to, channel), deque())
        while len(under_way) >= self.UNDER_WAY:
            under_way.popleft().wait()
        self.post()  # between this and the message, which may be what the other one waits for, nothing is computed
        under_way.append(message())

    def finish(self) -> None:
        """Wait until the last messages are sent, before their tensors are freed."""
        for under_way in self._sent.values():
            while under_way:
                under_way.popleft().wait()
