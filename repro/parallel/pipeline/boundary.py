"""Transfers between two pipeline stages: activations in one direction, their gradients in the other.

With overlap a stage receives a tensor while it computes the preceding action, and sends a tensor while it computes the
next action.  Without overlap, stages exchange outputs and next inputs between actions (`schedule.batches`).
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
    """Return whether pipeline stages communicate only between forward and backward passes, without overlap."""
    return layout.pp > 1 and not layout.overlap


class _Expected(NamedTuple):
    """Message that another pipeline stage will send, and whose receive is not posted yet."""

    buffer: Tensor
    source: int
    kind: str
    free: torch.cuda.Event | None
    """CUDA event after all earlier uses of the receive buffer's memory; None on a CPU."""


class DeferredReceives:
    """CUDA stream for receives that the host posts after it launched computation, but that do not wait for it.

    A posted receive occupies the device until its message comes, and launching computation may block until the device
    is idle (to load a kernel or to free memory). A receive posted before that launch would deadlock if its message
    depended on that computation.

    Interleaved stages with overlap and more micro-batches than stages can still deadlock if every launch blocks
    (`CUDA_LAUNCH_BLOCKING=1`) or every action frees memory: a send to another chunk occupies the device for long.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def record(self) -> torch.cuda.Event:
        """Record and return a CUDA event after all operations that are in the current stream."""
        return torch.cuda.current_stream().record_event()

    @contextmanager
    def after(self, moment: torch.cuda.Event) -> Iterator[None]:
        """Return a context whose receives wait for the CUDA event `moment`, but not for later operations."""
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield


class Boundary:
    """Transfers of activations and gradients [b, s, h] between neighbouring stages, in dtype and device of `like`."""

    UNDER_WAY = 2
    """Maximum number of unfinished sends of activations (and of gradients) to a rank; each send retains its tensor."""
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
        """Prepare a stage's transfers. `split`: Megatron's scatter/gather optimisation (2104.04473 sec. 4.1).

        Each of t tp ranks sends 1/t of a tensor, which all tp ranks hold, and the receivers all-gather the parts.
        """
        self.pp, self.tp, self.shape, self.overlap = pp, tp, shape, overlap
        self.split, self._like = split, like
        self.later = DeferredReceives() if like.is_cuda else None
        self._expected: deque[_Expected] = deque()
        self._posted: deque[tuple[Tensor, Work]] = deque()
        self._made: list[Callable[[], Work]] = []
        """Functions that start the sends which are deferred to the next exchange of messages; empty with overlap."""
        self._sent: dict[tuple[int, int], deque[Work]] = {}

    @staticmethod
    def channel(kind: str) -> int:
        """Return the channel number of messages with activations (0) or with their gradients (1)."""
        return 0 if kind == FORWARD else 1

    def _buffer(self, parts: int) -> Tensor:
        return storage.empty(torch.Size(self.shape).numel() // parts, self._like, Category.COMMUNICATION)

    def expect(self, source: int, kind: str) -> None:
        """Allocate a buffer for an activation or gradient of a stage; with overlap on a CPU, post the receive."""
        buffer = self._buffer(self.tp.size if self.split else 1)
        self._expected.append(_Expected(buffer, source, kind, self.later.record() if self.later else None))
        if self.overlap and self.later is None:
            self.post()

    def post(self) -> None:
        """Post the receives of all expected tensors; on a GPU, after the launch of concurrent computation."""
        while self._expected:
            buffer, source, kind, free = self._expected.popleft()
            if self.later is None or free is None:
                work = self.pp.receive(buffer, source, self.channel(kind))
            else:
                with self.later.after(free):
                    work = self.pp.receive(buffer, source, self.channel(kind))
            self._posted.append((buffer, work))

    def exchange(self) -> None:
        """Send the pending outputs, receive the expected tensors, and wait for all transfers (without overlap)."""
        self.post()
        works = [send() for send in self._made]
        self._made.clear()
        for work in (*works, *(work for _, work in self._posted)):
            work.wait()

    def receive(self) -> Tensor:
        """Wait for the oldest posted receive from another stage, and return its tensor [b, s, h]."""
        buffer, work = self._posted.popleft()
        work.wait()
        if self.split:
            gathered = self._buffer(1)
            self.tp.all_gather(gathered, buffer, purpose="boundary").wait()
            buffer = gathered
        # The received buffer counts as memory of activations from now on, and no longer as a communication buffer.
        return storage.mark(buffer, Category.ACTIVATIONS).view(self.shape)

    def send(self, tensor: Tensor, to: int, kind: str) -> None:
        """Start to send `tensor` [b, s, h] to stage `to`; without overlap, defer the send to the next `exchange`."""
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
        self.post()  # The computation before the send is launched already, so receives cannot delay it.
        under_way.append(message())

    def finish(self) -> None:
        """Wait until all messages of this stage are sent, so that their tensors can be freed."""
        for under_way in self._sent.values():
            while under_way:
                under_way.popleft().wait()
