"""Segments: the events of one pass of a transformer block as a list of steps, which other blocks repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from repro.parallel.storage import mark, unobserved
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.simulate.trace.events import Alloc, Event, Free, Mark, Message, Operator, Wait
from repro.simulate.trace.recorder import TraceRecorder


class UnrepeatableBlock(Exception):
    """A block does something that another block cannot repeat."""


class TensorMeta(NamedTuple):
    """Shape, stride and dtype of a tensor, from which a tensor without data is made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorMeta:
        """Return the shape, stride and dtype of `tensor`."""
        return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        """Return a tensor without data."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class GradientCall(NamedTuple):
    """A call that passes a gradient out of the block."""

    first: int
    """Index of the first event of the call."""
    end: int
    """Index of the first event after the call."""
    parameter: int
    """Index of the parameter among those of the block."""
    gradient: int
    """Storage of the parameter's gradient; -1 if a product goes to the gradient sink instead."""
    operands: tuple[TensorMeta, ...]
    """Operands of the product, rows [N, o] and x [N, i], or the gradient."""


class Instruction(IntEnum):
    """Kind of a segment's step."""

    EVENTS = 0
    """Events that have no effect beyond the block."""
    MAKE = 1
    """Allocation that other code comes to hold, which therefore needs a tensor."""
    DROP = 2
    """The block releases its reference to a tensor that other code may hold."""
    TAKEN = 3
    """The gradient of the block's output is freed."""
    MARK = 4
    """The category of an input changes."""
    SINK = 5
    """A product for the gradient of a matrix goes to the matrix's gradient sink."""
    GIVE = 6
    """A parameter's gradient is complete and goes to the parameter's hooks."""


Step = tuple[Instruction, Any, Any]


@dataclass
class EventRun:
    """Consecutive events of a block. Those with numbers of storages or messages are listed by their position."""

    events: list[Event] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    frees: list[tuple[int, int]] = field(default_factory=list)
    """Positions, and the places of the storages."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Positions, and the places of the storages."""
    messages: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)


@dataclass
class Segment:
    """The forward or the backward pass of a block.

    A storage's place is its number among those that the block allocates, forward and backward; the tensors that
    go into its forward pass have places below 0.
    """

    steps: list[Step]
    result: int | None
    """Place of the returned tensor; None if the pass returns the gradient that came in, or nothing."""
    returns_gradient: bool = False
    """Whether the pass returns the gradient that came in."""


@dataclass
class Recording:
    """The passes that blocks of a kind repeat."""

    forward: Segment | None = None
    backward: Segment | None = None
    adding: Segment | None = None
    """The backward pass that adds its gradients to those of earlier micro-batches (`GradientReducer.only_adds`). This
    pass has no effect beyond the block."""
    outliving: int | None = None
    """Place of the storage that is freed with the graph of the passes; None if there is none."""

    def find_outliving(self) -> None:
        """Set `outliving`. Raises `UnrepeatableBlock` if there are several, whose order would be unknown."""
        segments = [segment for segment in (self.forward, self.backward) if segment is not None]
        steps = [step for segment in segments for step in segment.steps]
        runs = [run for do, run, _ in steps if do is Instruction.EVENTS]
        count = sum(len(run.allocations) for run in runs) + sum(do is Instruction.MAKE for do, _, _ in steps)
        over = {place for run in runs for _, place in run.frees}
        over |= {place for do, place, _ in steps if do is Instruction.DROP}
        live = set(range(count)) - over - {segment.result for segment in segments}
        if len(live) > 1:
            raise UnrepeatableBlock(f"storages {sorted(live)} outlive the backward pass")
        self.outliving = next(iter(live), None)


@dataclass
class RecordedPass:
    """A pass that is being recorded."""

    start: int
    calls: list[GradientCall] = field(default_factory=list)


def segment_of(
    recorder: TraceRecorder,
    running: RecordedPass,
    places: dict[int, int],
    result: Tensor | None,
    gradient: int,
) -> Segment:
    """Return the events of `running` so far as a segment.

    `places` are the places of storages by number; the segment's own storages are added. `result` is the returned
    tensor, if any. `gradient` is the storage of the gradient that came in, or -1.
    """
    made = {call.gradient: call.operands[0] for call in running.calls if call.gradient >= 0}
    returned = gradient if result is None else recorder.number(result)
    if result is not None and returned != gradient:
        made[returned] = TensorMeta.from_tensor(result)
    steps = _SegmentWriter(recorder, places, made, gradient).steps(running)
    if returned == gradient:
        return Segment(steps, None, returns_gradient=result is not None)
    return Segment(steps, places[returned])


class _SegmentWriter:
    """Writer of the steps of a segment from the events of a pass."""

    def __init__(
        self, recorder: TraceRecorder, places: dict[int, int], made: dict[int, TensorMeta], gradient: int
    ):
        self.recorder, self.places, self.made, self.gradient = recorder, places, made, gradient
        self.following = max(-1, *places.values(), -1) + 1
        """Place of the next storage."""
        self.found: list[Step] = []
        self.run = EventRun()

    def steps(self, running: RecordedPass) -> list[Step]:
        """Return all steps of the pass."""
        events, at = self.recorder.events, running.start
        for call in running.calls:
            for event in events[at : call.first]:
                self._write(event)
            self._call(call)
            at = call.end
        for event in events[at:]:
            self._write(event)
        self._close()
        return self.found

    def _call(self, call: GradientCall) -> None:
        given = []
        for event in self.recorder.events[call.first : call.end]:
            if isinstance(event, Free) and event.id in self.places:
                if event.id not in self.made and self.places[event.id] >= 0:
                    raise UnrepeatableBlock(f"storage {event.id} is freed elsewhere")
                given.append(self.places[event.id])
        self._close()
        if call.gradient >= 0:
            self.found.append((Instruction.GIVE, call.parameter, (self.places[call.gradient], tuple(given))))
        else:
            with unobserved():
                operands = [meta.make() for meta in call.operands]
            self.found.append((Instruction.SINK, call.parameter, operands))

    def _close(self) -> None:
        if self.run.events:
            self.found.append((Instruction.EVENTS, self.run, None))
            self.run = EventRun()

    def _step(self, do: Instruction, what: Any, how: Any = None) -> None:
        self._close()
        self.found.append((do, what, how))

    def _write(self, event: Event) -> None:
        run, position = self.run, len(self.run.events)
        if isinstance(event, Alloc):
            if event.id in self.places:
                raise UnrepeatableBlock(f"storage {event.id} comes back")
            self.places[event.id] = self.following
            self.following += 1
            if event.id in self.made:
                unmarked = self.recorder.is_unmarked(event.id)
                self._step(Instruction.MAKE, event, (self.made[event.id], unmarked))
                return
            run.allocations.append(position)
        elif isinstance(event, Free):
            if event.id == self.gradient:
                self._step(Instruction.TAKEN, None)
                return
            place = self._place(event)
            if place < 0 or event.id in self.made:
                self._step(Instruction.DROP, place)
                return
            run.frees.append((position, place))
        elif isinstance(event, Mark):
            place = self._place(event)
            if place < 0:
                self._step(Instruction.MARK, place, event.category)
                return
            run.marks.append((position, place))
        elif isinstance(event, Message):
            run.messages.append(position)
        elif isinstance(event, Wait):
            run.waits.append(position)
        elif not isinstance(event, Operator):
            raise UnrepeatableBlock(f"{event} inside a block")
        run.events.append(event)

    def _place(self, event: Free | Mark) -> int:
        if event.id not in self.places:
            raise UnrepeatableBlock(f"{event} of a storage that is not the block's")
        return self.places[event.id]


class RepeatedBlock:
    """The forward and backward pass of one block, repeated from a recording."""

    def __init__(
        self,
        recorder: TraceRecorder,
        recording: Recording,
        parameters: Sequence[nn.Parameter],
        inputs: Sequence[Tensor],
        reducer: GradientReducer,
    ):
        self.recorder, self.recording, self.parameters = recorder, recording, parameters
        self.reducer = reducer
        self.numbers: list[int] = []
        """Numbers of storages by place."""
        with unobserved():
            self.held: dict[int, Tensor] = {-1 - i: tensor.detach() for i, tensor in enumerate(inputs)}
            """Tensors that other code may hold too, by place."""

    def __del__(self) -> None:
        if self.recording.outliving is not None:
            self.recorder.events.append(Free(self.numbers[self.recording.outliving]))

    def forward(self) -> Tensor:
        """Repeat the forward pass and return y."""
        segment = self.recording.forward
        assert segment is not None
        assert segment.result is not None
        self._do(segment.steps, None)
        return self.held.pop(segment.result)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Repeat the backward pass for the gradient of y and return the gradient of x, if there is an x."""
        recording, number = self.recording, self.recorder.number
        segment = recording.backward
        assert segment is not None
        if not self.reducer.only_adds:
            return self._backward(segment, gradient)
        if recording.adding is not None:
            return self._backward(recording.adding, gradient)
        places = {storage: place for place, storage in enumerate(self.numbers)}
        places |= {number(tensor): place for place, tensor in self.held.items()}
        start, came = len(self.recorder.events), number(gradient)
        result = self._backward(segment, gradient)
        recording.adding = segment_of(self.recorder, RecordedPass(start), places, result, came)
        return result

    def _backward(self, segment: Segment, gradient: Tensor) -> Tensor | None:
        self._do(segment.steps, gradient)
        result = gradient if segment.returns_gradient else None
        if segment.result is not None:
            result = self.held.pop(segment.result)
        self.held.clear()
        return result

    def _do(self, steps: Sequence[Step], gradient: Tensor | None) -> None:
        recorder, numbers, held = self.recorder, self.numbers, self.held
        works = dict[int, int]()
        for do, what, how in steps:
            if do is Instruction.EVENTS:
                self._repeat(what, works)
            elif do is Instruction.MAKE:
                meta, unmarked = how
                held[len(numbers)] = recorder.make(meta.make, what, unmarked=unmarked)
                numbers.append(recorder.number(held[len(numbers)]))
            elif do is Instruction.DROP:
                del held[what]
            elif do is Instruction.SINK:
                vars(self.parameters[what])["gradient_sink"](*how)
            elif do is Instruction.GIVE:
                self._give(self.parameters[what], *how)
            elif do is Instruction.MARK:
                mark(held[what], how)
            else:
                assert gradient is not None
                recorder.release(gradient)

    def _repeat(self, run: EventRun, works: dict[int, int]) -> None:
        """Append the events of `run` under new numbers. `works`: numbers of the pass's messages by recorded numbers."""
        recorder, numbers, events = self.recorder, self.numbers, list[Any](run.events)
        new: Any = tuple.__new__  # takes half the time of a named tuple's constructor
        first = recorder.reserve(len(run.allocations))
        numbers.extend(range(first, first + len(run.allocations)))
        for number, at in enumerate(run.allocations, first):
            events[at] = new(Alloc, (number, *events[at][1:]))
        for at, place in run.frees:
            events[at] = new(Free, (numbers[place],))
        for at, place in run.marks:
            events[at] = new(Mark, (numbers[place], events[at][1]))
        for at in run.messages:
            message = events[at]
            recorder.works += 1
            works[message.work] = recorder.works
            events[at] = message._replace(work=recorder.works)
        for at in run.waits:
            events[at] = new(Wait, (works[events[at].work],))
        recorder.events += events

    def _give(self, parameter: nn.Parameter, place: int, given: Sequence[int]) -> None:
        """Pass a complete gradient to the parameter and its hooks, and drop the tensors in `given`."""
        parameter.grad = self.held[place]
        for storage in given:
            del self.held[storage]
        for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
            hook(parameter)
