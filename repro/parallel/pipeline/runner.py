"""Pipeline parallelism: one runner for every schedule (2104.04473 sec. 2.2).

A rank runs the actions of its stage in order; `boundary` transfers their inputs and outputs. Between forward and
backward of a micro-batch, only tensors saved by autograd are retained, not the received input and sent output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from repro.config import Layout
from repro.config.enums import Category, Phase
from repro.parallel import storage
from repro.parallel.comm import Group
from repro.parallel.pipeline.boundary import Boundary, exchanges
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, batches, build_schedule, dependency_of

_PHASES = {FORWARD: Phase.FORWARD, BACKWARD: Phase.BACKWARD}
Observer = Callable[[Phase], None]
"""Function that is called when a phase of the step begins: forward, backward, idle (wait for a stage), optimizer."""


class Chunk(Protocol):
    """Interface of a model chunk (consecutive layers on one pipeline stage), which the pipeline runner calls."""

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Return the output [b, s, h], or the last chunk's mean loss, for input x [b, s, h] (None for the first)."""

    def before_backward(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare the chunk for backward pass number `micro_batch` (from 0) of the `micro_batches` passes of a step."""

    def after_backward(self) -> None:
        """Start the remaining gradient reductions, after a backward pass has computed all gradients of the chunk."""


class _Slot:
    """Container for the gradient of an activation, which a backward pass receives from or sends to another stage."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class _Entrance(torch.autograd.Function):
    """Insert a received activation into the autograd graph, not retaining it; backward puts its gradient in `slot`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.slot.gradient = gradients[0]
        return None, None, None


class _Exit(torch.autograd.Function):
    """Replace a stage's output by a 0-dim tensor, whose backward starts from the received output gradient in `slot`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.slot.gradient = ctx.slot.gradient, None
        return gradient, None


class Pipeline:
    """Pipeline stage on one rank: its forward and backward passes, its model chunks, and transfers to other stages."""

    def __init__(
        self,
        layout: Layout,
        pp: Group,
        tp: Group,
        chunks: Sequence[Chunk],
        shape: tuple[int, int, int],
        like: Tensor,
    ):
        """Create a runner. `shape`: [b, s, h] (s/t under sp) of transfers. `like`: tensor of their dtype and device."""
        self.pp, self.chunks, self.micro_batches = pp, list(chunks), layout.accumulation
        self.actions = build_schedule(layout.schedule, pp.size, layout.accumulation, layout.chunks)[pp.rank]
        self.batches = (
            batches(self.actions, layout.chunks) if exchanges(layout) else [(a,) for a in self.actions]
        )
        """Groups of the stage's actions (forward and backward passes). Without overlap, messages follow each group."""
        self.boundary = Boundary(
            pp, tp, shape, like, split=layout.scatter_gather, overlap=not exchanges(layout)
        )
        self.in_flight = 0
        """Maximum number of (micro-batch, chunk) pairs that were between forward and backward at once on this stage."""
        self.position = -1
        """Index in `actions` of the action that the stage runs; -1 outside `run`."""
        self._live: dict[tuple[int, int], tuple[_Slot, _Slot, Tensor]] = {}
        self._passes = [0] * len(self.chunks)
        # Without an input that requires a gradient, autograd would not record functions of received tensors.
        self._anchor = torch.empty(0, device=like.device, requires_grad=True)

    @property
    def current(self) -> Action | None:
        """Return the forward or backward pass that the stage runs or whose input it awaits; None outside `run`."""
        return self.actions[self.position] if self.position >= 0 else None

    def run(self, scale: Tensor | None, observe: Observer) -> Tensor:
        """Run forward and backward of all micro-batches; return the mean loss (0-dim fp32; 0 except on the last stage).

        Gradients are those of the mean loss, multiplied by `scale` (0-dim) if given.
        """
        total = storage.zeros(1, self._anchor, Category.OTHER, torch.float32)[0]
        self._passes = [0] * len(self.chunks)
        self.position = 0
        self._expect(self.batches[0])
        if self.boundary.overlap:
            self.boundary.post()
        else:
            observe(Phase.IDLE)
            self.boundary.exchange()
        for batch, following in pairwise([*self.batches, ()]):
            for action in batch:
                received = None
                if self._source(action) is not None:
                    observe(Phase.IDLE)
                    received = self.boundary.receive()
                if self.boundary.overlap:
                    self._expect(following)
                observe(_PHASES[action.kind])
                if action.kind == FORWARD:
                    loss = self._forward(action, received, scale)
                    if loss is not None:
                        total += loss
                else:
                    self._backward(action, received)
                if not self.boundary.overlap and action is batch[-1]:
                    observe(Phase.IDLE)
                    self._expect(following)
                    self.boundary.exchange()
                    observe(_PHASES[action.kind])
                if action.kind == BACKWARD:
                    self.chunks[action.chunk].after_backward()
                if self.boundary.overlap:
                    self.boundary.post()  # Post the next receives, unless the preceding send has posted them.
                self.position += 1
        self.position = -1
        self.boundary.finish()
        return total / self.micro_batches

    def _source(self, action: Action) -> int | None:
        """Return the stage that sends an action's input; None if the input comes from this stage or from the data."""
        needed = dependency_of(action, self.pp.rank, self.pp.size, len(self.chunks))
        return None if needed is None or needed[0] == self.pp.rank else needed[0]

    def _expect(self, actions: Sequence[Action]) -> None:
        for action in actions:
            source = self._source(action)
            if source is not None:
                self.boundary.expect(source, action.kind)

    def _forward(self, action: Action, received: Tensor | None, scale: Tensor | None) -> Tensor | None:
        entrance, exit_ = _Slot(), _Slot()
        x = received
        if received is not None:
            x = _Entrance.apply(self._anchor, received, entrance)
        y = self.chunks[action.chunk].forward(action.micro_batch, x)
        loss = None
        if self.pp.rank == self.pp.size - 1 and action.chunk == len(self.chunks) - 1:
            loss = y.detach()
            handle = y / self.micro_batches if self.micro_batches > 1 else y
            handle = handle if scale is None else handle * scale
        else:
            handle = _Exit.apply(y, exit_)
            self.boundary.send(y.detach(), (self.pp.rank + 1) % self.pp.size, action.kind)
        self._live[action.micro_batch, action.chunk] = (entrance, exit_, handle)
        self.in_flight = max(self.in_flight, len(self._live))
        return loss

    def _backward(self, action: Action, received: Tensor | None) -> None:
        entrance, exit_, handle = self._live.pop((action.micro_batch, action.chunk))
        exit_.gradient = received
        del received
        chunk = self.chunks[action.chunk]
        chunk.before_backward(self._passes[action.chunk], self.micro_batches)
        self._passes[action.chunk] += 1
        handle.backward()
        if entrance.gradient is not None:
            self.boundary.send(entrance.gradient, (self.pp.rank - 1) % self.pp.size, action.kind)
