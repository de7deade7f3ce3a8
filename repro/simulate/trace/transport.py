"""Transports without data for traces: they record messages and waits, and allocate the buffers of real transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from repro.config.enums import Category
from repro.parallel.storage import empty
from repro.parallel.transports import NoTransport, Transport, Work
from repro.simulate.trace.events import Message, Receive, Wait

if TYPE_CHECKING:
    from repro.simulate.trace.recorder import TraceRecorder


class RecordedTransport:
    """Transport that numbers each message in the trace and records the wait for its completion.

    Tensor operations of the wrapped transport `inner` are not recorded as operators of the step.
    """

    def __init__(self, inner: Transport, recorder: TraceRecorder):
        self.inner, self.recorder, self.reduces_in_place = inner, recorder, inner.reduces_in_place

    def _number(self) -> int:
        self.recorder.works += 1
        return self.recorder.works

    def _issued(self, work: Work, number: int) -> Work:
        recorder = self.recorder

        def finish() -> None:
            with recorder.no_operators():
                work.wait()
            recorder.events.append(Wait(number))

        return Work(finish=finish)

    def _collective(self, start: Callable[[], Work]) -> Work:
        number, events = self._number(), self.recorder.events
        message = events[-1]
        assert isinstance(message, Message), (
            "a collective starts, but the last recorded event is not its `Message`"
        )
        events[-1] = message._replace(work=number)
        with self.recorder.no_operators():
            return self._issued(start(), number)

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        return self._collective(lambda: self.inner.all_reduce(tensor, op))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return self._collective(lambda: self.inner.reduce_scatter(output, input))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return self._collective(lambda: self.inner.all_gather(output, input))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._collective(lambda: self.inner.broadcast(tensor, source))

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        # The trace already contains the message, recorded at its creation, perhaps long before this start of the send.
        return self._issued(self.inner.send(tensor, to, channel), self._number())

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        number = self._number()
        size = tensor.numel() * tensor.element_size()
        self.recorder.events.append(Receive("pp", size, number, source, channel))
        return self._issued(self.inner.receive(tensor, source, channel), number)

    def barrier(self) -> None:
        self.inner.barrier()


class NoDataTransport(NoTransport):
    """Transport that copies no data, not even a rank's own part, because `meta` tensors have no data."""

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return Work()

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return Work()


class GlooBufferTransport(NoDataTransport):
    """Transport that allocates the buffers of `repro.parallel.transports.GlooTransport`, without data."""

    reduces_in_place = False

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        received = [empty(input.numel() - output.numel(), input, Category.COMMUNICATION)]

        def finish() -> None:
            if self.size > 2:
                mine = input.chunk(self.size)[self.rank]
                total = mine.float() if output.itemsize < 4 else mine.clone()
                output.copy_(total)
            received.clear()

        return Work(finish=finish)
