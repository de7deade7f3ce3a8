"""Recorded passes of a transformer block as lists of instructions, with which other blocks repeat the events."""

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
    """Error: a recorded block has an effect that other blocks cannot repeat from its recording."""


class TensorMeta(NamedTuple):
    """Shape, stride and dtype of a tensor, from which `make` creates a `meta` tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorMeta:
        """Return the shape, stride and dtype of `tensor`."""
        return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        """Return a new `meta` tensor of this shape, stride and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class GradientCall(NamedTuple):
    """Call of a parameter's gradient hook or sink (which computes the gradient) in a recorded block's backward pass."""

    first: int
    """Index in the trace of the first event that the call of the gradient hook or sink causes."""
    end: int
    """Index in the trace of the first event after the call of the gradient hook or sink."""
    parameter: int
    """Index of the parameter in the transformer block's list of parameters."""
    gradient: int
    """Storage number of the parameter's gradient; -1 for a gradient sink, which computes the gradient itself."""
    operands: tuple[TensorMeta, ...]
    """Shapes of the tensors that the gradient hook or gradient sink receives.

    A hook receives the gradient. A sink receives the output's gradient [N, o] and the input [N, i] of a linear layer. N
    is the number of tokens, and o and i are the numbers of outputs and inputs per token.
    """


class Instruction(IntEnum):
    """Instruction by which a repeated transformer block reproduces recorded events."""

    EVENTS = 0
    """Append events that affect only the block's own storages."""
    MAKE = 1
    """Create a `meta` tensor for an allocation, because code outside the block receives the tensor."""
    DROP = 2
    """Delete the block's reference to a tensor that code outside the block may also reference."""
    TAKEN = 3
    """Record that the gradient of the block's output is freed."""
    MARK = 4
    """Change the memory category of an input of the forward pass."""
    SINK = 5
    """Call the function (gradient sink) that computes a weight's gradient from its two factors."""
    GIVE = 6
    """Set a parameter's `.grad` to the complete gradient, and call the parameter's gradient hooks."""


Step = tuple[Instruction, Any, Any]


@dataclass
class EventRun:
    """Consecutive events of a block, and the positions of events whose storage or message numbers must be replaced."""

    events: list[Event] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    frees: list[tuple[int, int]] = field(default_factory=list)
    """Position in `events` of each release, and index of the freed storage within the block (see `Segment`)."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Position in `events` of each change of memory category, and the storage's index within the block."""
    messages: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)


@dataclass
class Segment:
    """The forward or the backward pass of a block, as instructions.

    Block-local indices number the storages that both passes of the block allocate, from 0 in the order of allocation.
    Inputs of the forward pass have the indices -1, -2, ...
    """

    steps: list[Step]
    result: int | None
    """Index within the block of the returned tensor; None if the pass returns its incoming gradient, or nothing."""
    returns_gradient: bool = False
    """Whether the backward pass returns its incoming gradient unchanged."""


@dataclass
class Recording:
    """Recorded forward and backward pass of a transformer block, which all blocks of one `BlockKind` repeat."""

    forward: Segment | None = None
    backward: Segment | None = None
    adding: Segment | None = None
    """A backward pass that only adds gradients to those of earlier micro-batches (`GradientReducer.only_adds`)."""
    outliving: int | None = None
    """Index within the block of the storage that lives until autograd frees its graph; None without such a storage."""

    def find_outliving(self) -> None:
        """Find the storage that is freed only with autograd's graph, and assign its index to `outliving`.

        Raises `UnrepeatableBlock` for several such storages, whose release order is unknown.
        """
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
    """Forward or backward pass of a transformer block during its recording."""

    start: int
    calls: list[GradientCall] = field(default_factory=list)


def segment_of(
    recorder: TraceRecorder,
    running: RecordedPass,
    places: dict[int, int],
    result: Tensor | None,
    gradient: int,
) -> Segment:
    """Return the recorded events of the pass `running` as a segment, which is a list of instructions.

    `places` maps storage numbers to block-local indices, to which storages that the pass allocates are added. `result`
    is the tensor that the pass returns, or None. `gradient` is the storage number of the incoming gradient, or -1.
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
    """Converter of the recorded events of a block's forward or backward pass into instructions."""

    def __init__(
        self, recorder: TraceRecorder, places: dict[int, int], made: dict[int, TensorMeta], gradient: int
    ):
        self.recorder, self.places, self.made, self.gradient = recorder, places, made, gradient
        self.following = max(-1, *places.values(), -1) + 1
        """Index within the block of the next storage that the pass allocates."""
        self.found: list[Step] = []
        self.run = EventRun()

    def steps(self, running: RecordedPass) -> list[Step]:
        """Return the instructions with which other blocks repeat the recorded pass `running`."""
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
                    raise UnrepeatableBlock(f"a gradient hook frees storage {event.id} of the block")
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
                raise UnrepeatableBlock(f"the recorded transformer block allocates storage {event.id} twice")
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
            raise UnrepeatableBlock(f"other transformer blocks cannot repeat the recorded event {event}")
        run.events.append(event)

    def _place(self, event: Free | Mark) -> int:
        if event.id not in self.places:
            raise UnrepeatableBlock(f"{event} refers to a storage that the recorded block did not allocate")
        return self.places[event.id]


class RepeatedBlock:
    """Forward and backward pass of one transformer block, repeated from a recording without running the block."""

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
        """Number in the trace of each storage of this block, in the order of allocation."""
        with unobserved():
            self.tensors: dict[int, Tensor] = {-1 - i: tensor.detach() for i, tensor in enumerate(inputs)}
            """Tensors that code outside the block may also reference, by index of their storage in the block."""

    def __del__(self) -> None:
        if self.recording.outliving is not None:
            self.recorder.events.append(Free(self.numbers[self.recording.outliving]))

    def forward(self) -> Tensor:
        """Repeat the recorded forward pass, and return the block's output."""
        segment = self.recording.forward
        assert segment is not None
        assert segment.result is not None
        self._do(segment.steps, None)
        return self.tensors.pop(segment.result)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Repeat the recorded backward pass for the output's `gradient`; return the input's gradient or None."""
        recording, number = self.recording, self.recorder.number
        segment = recording.backward
        assert segment is not None
        if not self.reducer.only_adds:
            return self._backward(segment, gradient)
        if recording.adding is not None:
            return self._backward(recording.adding, gradient)
        places = {storage: place for place, storage in enumerate(self.numbers)}
        places |= {number(tensor): place for place, tensor in self.tensors.items()}
        start, came = len(self.recorder.events), number(gradient)
        result = self._backward(segment, gradient)
        recording.adding = segment_of(self.recorder, RecordedPass(start), places, result, came)
        return result

    def _backward(self, segment: Segment, gradient: Tensor) -> Tensor | None:
        self._do(segment.steps, gradient)
        result = gradient if segment.returns_gradient else None
        if segment.result is not None:
            result = self.tensors.pop(segment.result)
        self.tensors.clear()
        return result

    def _do(self, steps: Sequence[Step], gradient: Tensor | None) -> None:
        recorder, numbers, tensors = self.recorder, self.numbers, self.tensors
        works = dict[int, int]()
        for do, what, how in steps:
            if do is Instruction.EVENTS:
                self._repeat(what, works)
            elif do is Instruction.MAKE:
                meta, unmarked = how
                tensors[len(numbers)] = recorder.make(meta.make, what, unmarked=unmarked)
                numbers.append(recorder.number(tensors[len(numbers)]))
            elif do is Instruction.DROP:
                del tensors[what]
            elif do is Instruction.SINK:
                vars(self.parameters[what])["gradient_sink"](*how)
            elif do is Instruction.GIVE:
                self._give(self.parameters[what], *how)
            elif do is Instruction.MARK:
                mark(tensors[what], how)
            else:
                assert gradient is not None
                recorder.release(gradient)

    def _repeat(self, run: EventRun, works: dict[int, int]) -> None:
        """Append the recorded events `run` with new storage and message numbers. `works`: recorded to new number."""
        recorder, numbers, events = self.recorder, self.numbers, list[Any](run.events)
        new: Any = tuple.__new__  # `tuple.__new__` takes half the time of a named tuple's constructor.
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
        """Set a parameter's `.grad`, delete the references to the tensors `given`, and call the gradient hooks."""
        parameter.grad = self.tensors[place]
        for storage in given:
            del self.tensors[storage]
        for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
            hook(parameter)
