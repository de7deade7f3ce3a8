"""Repetition of transformer blocks in a trace: one block of each kind runs, and the others repeat its recorded events.

Running all blocks would take nearly all of a trace's time, although their events differ only in storage and message
numbers. Gradient hooks, gradient buckets and exchanged tensors are real. The trace equals one in which all blocks run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from repro.config import Experiment
from repro.engines.native.model_part import ModelPart
from repro.model.gpt import BatchPosition, Part
from repro.model.layer import Masks
from repro.parallel.pipeline.runner import Pipeline
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.parallel.storage import unobserved
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints
from repro.simulate.trace.recorder import TraceRecorder
from repro.simulate.trace.segments import (
    GradientCall,
    RecordedPass,
    Recording,
    RepeatedBlock,
    Segment,
    TensorMeta,
    segment_of,
)


class BlockKind(NamedTuple):
    """Kind of a transformer block. Blocks of one kind have equal events, except for storage and message numbers."""

    after: str
    """Source of the block's input: a `block`, the `embedding`, or another `stage`."""
    before: str
    """Receiver of the block's output: a `block`, the `head`, or another `stage`."""
    graph: bool
    """Whether autograd records the forward pass; False in activation checkpointing before the recomputation."""


class BlockRepeater:
    """Replacement of the forward functions of a rank's transformer blocks; most blocks repeat recorded events."""

    def __init__(
        self,
        recorder: TraceRecorder,
        pipeline: Pipeline,
        recordings: dict[BlockKind, Recording],
        checkpoints: ActivationCheckpoints | None,
    ):
        """`recordings`: recorded transformer blocks of earlier traces with equal layers; this trace adds its own."""
        self.recorder, self.recordings, self.recomputed = recorder, recordings, checkpoints is not None
        self.retains_inputs = checkpoints is None or checkpoints.is_plain
        """Whether a model part retains its input tensor until the backward pass, instead of a copy or a slice of it."""
        self._pipeline = pipeline
        self._first = {a.chunk: a.micro_batch for a in reversed(pipeline.actions) if a.kind == BACKWARD}
        """Micro-batch whose backward pass comes first, for each chunk of layers."""
        self.running: RecordedPass | None = None
        """Backward pass that is being recorded; None at other times."""
        self._blocks: list[nn.Module] = []
        self._parts: list[ModelPart] = []

    def attach(self, part: ModelPart, chunk: int) -> None:
        """Replace the forward functions of a model part and of its blocks by functions that run or repeat events."""
        typical = _typical_micro_batches(self._pipeline, chunk)
        if part.sharded.sharding.stage < 2 and len(typical) > 1:
            part.forward = _RepeatablePart(self, part, typical).forward  # type: ignore[method-assign]
            self._parts.append(part)
        blocks = list(part.model.blocks.values())
        for index, block in enumerate(blocks):
            after, before = _neighbours(index, len(blocks), part.model.part)
            # Among blocks that have a block on both sides, the last one runs its backward pass first.
            soonest = not 0 < index < len(blocks) - 2
            repeatable = _RepeatableBlock(self, block, after, before, part.sharded.reducer, soonest)
            block.forward = repeatable.forward  # type: ignore[method-assign]
            self._blocks.append(block)

    def first_backward(self) -> bool:
        """Return whether the current micro-batch is the first one of its chunk of layers to run a backward pass."""
        action = self._pipeline.current
        return action is not None and self._first[action.chunk] == action.micro_batch

    def detach(self) -> None:
        """Restore the forward functions of all blocks and model parts."""
        for block in self._blocks:
            del block.forward
        for part in self._parts:
            del part.forward
        self._blocks.clear()
        self._parts.clear()

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Wrap the functions that receive a block's parameter gradients, to record each call as a `GradientCall`."""
        for number, parameter in enumerate(parameters):
            own = vars(parameter)
            sink = own.get("gradient_sink")
            if sink is not None:
                own["gradient_sink"] = partial(self._sunk, number, sink)
            hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            for key, hook in hooks.items():
                hooks[key] = partial(self._accumulated, number, hook)

    def _sunk(self, number: int, sink: Callable[[Tensor, Tensor], None], rows: Tensor, x: Tensor) -> None:
        self._called(
            partial(sink, rows, x), number, -1, (TensorMeta.from_tensor(rows), TensorMeta.from_tensor(x))
        )

    def _accumulated(self, number: int, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
        gradient = parameter.grad
        if self.running is None or gradient is None:
            hook(parameter)
            return
        storage, meta = self.recorder.number(gradient), TensorMeta.from_tensor(gradient)
        del gradient
        self._called(partial(hook, parameter), number, storage, (meta,))

    def _called(
        self, call: Callable[[], None], parameter: int, gradient: int, operands: tuple[TensorMeta, ...]
    ) -> None:
        running, events = self.running, self.recorder.events
        first = len(events)
        call()
        if running is not None:
            running.calls.append(GradientCall(first, len(events), parameter, gradient, operands))


class _RepeatableBlock:
    """Forward function of a transformer block, which runs the block or repeats events of a recorded similar block."""

    def __init__(
        self,
        repeats: BlockRepeater,
        block: nn.Module,
        after: str,
        before: str,
        reducer: GradientReducer,
        soonest: bool,
    ):
        """`soonest`: whether no other block of this kind in the model part runs its backward pass earlier."""
        self.repeats, self.run, self.soonest = repeats, block.forward, soonest
        self.parameters = list(block.parameters())
        self.after, self.before, self.reducer = after, before, reducer

    def forward(self, x: Tensor, place: BatchPosition, masks: Masks = ()) -> Tensor:
        """Run the block, or repeat the events of a recorded block of its kind. Arguments: those of `Block.forward`."""
        kind = BlockKind(self.after, self.before, torch.is_grad_enabled())
        recording = self.repeats.recordings.setdefault(kind, Recording())
        inputs = [x, *masks]
        if self._runs(recording, kind.graph):
            record = _BlockRecorder(self.repeats, recording, inputs)
            if not kind.graph:
                return record.forward(self.run(x, place, masks))
            self.repeats.watch(self.parameters)
            y = self.run(_ObservedGradient.apply(x, record.leave), place, masks)
            return _ObservedGradient.apply(record.forward(y), record.enter)
        again = RepeatedBlock(self.repeats.recorder, recording, self.parameters, inputs, self.reducer)
        return _RepeatedFunction.apply(x, again) if kind.graph else again.forward()

    def _runs(self, recording: Recording, graph: bool) -> bool:
        if recording.forward is None:
            return True
        if not graph or recording.backward is not None:
            return False
        return self.repeats.recomputed or (self.soonest and self.repeats.first_backward())


class _RepeatablePart:
    """Forward function of one model part, which runs the part or repeats the events of an earlier micro-batch.

    Under ZeRO stages 0 and 1, a micro-batch that is neither first nor last only adds to gradients of the model part.
    """

    def __init__(self, repeats: BlockRepeater, part: ModelPart, typical: Sequence[int]):
        """`typical`: micro-batches that are neither first nor last. The first runs; the others repeat its events."""
        self.repeats, self.run, self.reducer = repeats, part.forward, part.sharded.reducer
        self.typical, self.recording = typical, Recording()
        with unobserved():
            self._anchor = torch.empty(0, device="meta", requires_grad=True)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Run the model part, or repeat an earlier micro-batch's events. Arguments: those of `ModelPart.forward`."""
        if micro_batch not in self.typical:
            return self.run(micro_batch, x)
        inputs = [] if x is None else [x]
        if micro_batch != self.typical[0]:
            retained = inputs if self.repeats.retains_inputs else ()
            again = RepeatedBlock(self.repeats.recorder, self.recording, (), retained, self.reducer)
            found: Tensor = _RepeatedFunction.apply(self._anchor if x is None else x, again)
            return found
        record = _PartRecorder(self.repeats, self.recording, inputs)
        y = self.run(micro_batch, None if x is None else _ObservedGradient.apply(x, record.leave))
        return _ObservedGradient.apply(record.forward(y), record.enter)


class _BlockRecorder:
    """Recorder of the forward and backward pass of one transformer block while the block runs."""

    def __init__(self, repeats: BlockRepeater, recording: Recording, inputs: Sequence[Tensor]):
        self.repeats, self.recorder, self.recording = repeats, repeats.recorder, recording
        self.places = {self.recorder.number(tensor): -1 - i for i, tensor in enumerate(inputs)}
        """Index of each storage among the storages of the recorded block, by its number in the trace."""
        self.running = RecordedPass(len(self.recorder.events))
        self.gradient = -1
        self.has_input = bool(inputs)

    def forward(self, y: Tensor) -> Tensor:
        """Record the events of a finished forward pass, whose result is `y`, and return `y`."""
        self.recording.forward = self._segment(y)
        return y

    def enter(self, gradient: Tensor) -> None:
        """Begin to record the backward pass of a block. `gradient`: gradient of the block's output."""
        self.gradient = self.recorder.number(gradient)
        self.repeats.running = self.running = RecordedPass(len(self.recorder.events))

    def leave(self, gradient: Tensor) -> None:
        """End the recording of the backward pass of a block. `gradient`: gradient of the block's input."""
        self.repeats.running = None
        self.recording.backward = self._segment(gradient)

    def _segment(self, result: Tensor | None) -> Segment:
        return segment_of(self.recorder, self.running, self.places, result, self.gradient)


class _PartRecorder(_BlockRecorder):
    """Recorder of the forward and backward pass of one model part while the part runs."""

    def enter(self, gradient: Tensor) -> None:
        """Begin to record a model part's backward pass. Without an input, it ends with autograd's backward pass."""
        self.gradient, self.running = self.recorder.number(gradient), RecordedPass(len(self.recorder.events))
        if not self.has_input:
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def leave(self, gradient: Tensor | None = None) -> None:
        """End the recording of a part's backward pass. `gradient`: gradient of its input; None without an input."""
        self.recording.backward = self.recording.adding = self._segment(gradient)
        self.recording.find_outliving()


class _ObservedGradient(torch.autograd.Function):
    """Identity function at the input or output of a recorded block. Its backward pass calls `seen(gradient)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.seen(gradients[0])
        return gradients[0], None


class _RepeatedFunction(torch.autograd.Function):
    """Autograd function whose forward and backward pass repeat the recorded events of a block or a model part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: RepeatedBlock) -> Tensor:
        ctx.again = again
        return again.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.again.backward(gradients[0]), None


def _typical_micro_batches(pipeline: Pipeline, chunk: int) -> list[int]:
    """Return the micro-batches of a chunk of layers that are neither first nor last, in the order of forward passes.

    The list is empty unless the first of these micro-batches also runs its backward pass before the others.
    """
    forward, backward = (
        [action.micro_batch for action in pipeline.actions if (action.kind, action.chunk) == (kind, chunk)]
        for kind in (FORWARD, BACKWARD)
    )
    found = [micro_batch for micro_batch in forward[1:] if micro_batch in backward[1:-1]]
    return found if found and found[0] == next(b for b in backward[1:] if b in found) else []


def _neighbours(index: int, count: int, part: Part) -> tuple[str, str]:
    """Return the source of a transformer block's input and the receiver of its output, named as in `BlockKind`."""
    after = "block" if index else "embedding" if part.first else "stage"
    before = "block" if index < count - 1 else "head" if part.last else "stage"
    return after, before


MAX_RECORDING_SETS = 64
"""Maximum number of sets of recorded blocks in a process's cache. A set takes a few hundred kilobytes."""


def recordings_of(experiment: Experiment, gloo: bool) -> dict[BlockKind, Recording]:
    """Return the cached records of transformer blocks, shared by all experiments whose blocks have equal events."""
    layout, training, model = experiment.layout, experiment.training, experiment.model
    return recordings(
        (model.hidden, model.heads, model.head_width, model.ffn_width, experiment.seq),
        tuple(model.departures().items()),
        (
            layout.tp,
            layout.cp,
            layout.tp_overlap,
            layout.sp,
            layout.micro_batch,
            layout.recompute,
            layout.zero == 3,
            layout.grad_dtype,
        ),
        (layout.kernels, layout.precision, training.dropout > 0, training.attention_dropout > 0, gloo),
    )


@lru_cache(MAX_RECORDING_SETS)
def recordings(*key: tuple[object, ...]) -> dict[BlockKind, Recording]:
    """Return the cached recordings of transformer blocks whose shapes and options are `key`; initially empty."""
    return {}
