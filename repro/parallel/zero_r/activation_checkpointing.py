"""Activation recomputation with one checkpoint per block (Chen et al. 2016), and P_a (1910.02054 sec. 3.2, 6.1).

Forward retains the input x of a block and frees the block's activations. Backward runs the block's forward again.

| layout | checkpoint of x [b, s, h] on a rank | before the block runs again |
|---|---|---|
| (neither) | x itself | nothing |
| `pa` | 1/tp of x, P_a | an all-gather over the tp group |
| `pa_cpu` | as `pa` (with tp = 1 or sp: x), in host memory, P_a+cpu | a copy to the device, then as `pa` |

A checkpoint is copied to the device while the block after it runs backward. With `md` all checkpoints are in one
allocation (M_D, sec. 6.3). `recompute_attention` saves no checkpoints, because attention retains its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.config import Layout
from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group
from repro.parallel.zero.partition import ALIGNMENT
from repro.parallel.zero_r.defragmentation import Arena, Piece


class ActivationCheckpoint:
    """Activation checkpoint: the saved input of one transformer block, from which backward recomputes the block."""

    __slots__ = ("arena", "before", "device", "fetched", "kept", "piece", "ready", "shape")

    def __init__(self, x: Tensor, before: ActivationCheckpoint | None):
        self.shape, self.device = x.shape, x.device
        self.before = before
        """Activation checkpoint of the preceding block, which backward loads after this checkpoint."""
        self.kept: Tensor | None = None
        """Saved input x of the block, or a flat part of x, on the device or the host; None after `drop`."""
        self.arena: Arena | None = None
        self.piece: Piece | None = None
        """Piece of preallocated memory that contains the checkpoint under `md` (defragmentation); None without."""
        self.fetched: Tensor | None = None
        """Flat copy on the device of a checkpoint in host memory; None before the copy starts, and after `load`."""
        self.ready: torch.cuda.Event | None = None
        """CUDA event at the end of the copy of an offloaded checkpoint to the device; None without such a copy."""

    def drop(self) -> None:
        """Free the saved tensor of this checkpoint, and return its preallocated memory, if any, for reuse."""
        if self.arena is not None and self.piece is not None:
            self.arena.give(self.piece)
        self.kept = self.piece = None

    def __del__(self) -> None:
        self.drop()  # Without a backward pass, nothing else frees the saved checkpoint.


class ActivationCheckpoints:
    """Activation checkpoints of one model: each block's input is saved in forward, and loaded once in backward."""

    def __init__(self, layout: Layout, tp: Group, capacity: int):
        """Create a model's checkpoints. `capacity`: maximum number at one time, for which `md` preallocates memory."""
        self.tp, self.capacity = tp, capacity
        self.parts = tp.size if layout.pa else 1
        self.offload, self.contiguous = layout.pa_cpu, layout.md
        self.arena: Arena | None = None
        """Preallocated memory of all checkpoints under `md`, created at the first one with pieces of its size."""
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether a checkpoint is the block's input itself: no partition, offload or preallocated memory."""
        return self.parts == 1 and not self.offload and not self.contiguous

    def save(self, x: Tensor, before: ActivationCheckpoint | None = None) -> ActivationCheckpoint:
        """Save a block's input `x` [b, s, h] (sp: [b, s/t, h]). `before`: checkpoint that backward loads next.

        With `pa` all ranks of the tp group must save the same values.
        """
        saved = ActivationCheckpoint(x, before)
        if self.is_plain:
            saved.kept = storage.mark(x.detach(), Category.CHECKPOINTS)
            return saved
        # All tp ranks save parts of equal size; the last part may end in padding.
        size = -(-x.numel() // self.parts)
        first = self.tp.rank * size if self.parts > 1 else 0
        part = x.detach().reshape(-1)[first : first + size]
        saved.kept = self._allocate(size, x, saved)
        target = saved.kept[: part.numel()]
        stream = self._copy_stream(x) if self.offload else None
        if stream is None:
            target.copy_(part)
        else:
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                target.copy_(part, non_blocking=True)
            part.record_stream(stream)  # The allocator may reuse the memory of x only after the copy.
        return saved

    def load(self, saved: ActivationCheckpoint) -> Tensor:
        """Return a block's full input on the device from its checkpoint, and start to fetch the next checkpoint.

        If the result is a copy, the saved tensor is freed. Otherwise `free` frees it after the use of the result.

        Raises: `RuntimeError` if the checkpoint was loaded before.
        """
        if saved.kept is None and saved.fetched is None:
            raise RuntimeError("a block's backward pass ran twice, but the first one freed its checkpoint")
        before, saved.before = saved.before, None
        if self.offload:
            self._fetch(saved)
            if before is not None:
                self._fetch(before)
            if saved.ready is not None:
                torch.cuda.current_stream(saved.device).wait_event(saved.ready)
            part, saved.fetched = saved.fetched, None
        else:
            part = saved.kept
        assert part is not None
        if self.is_plain:
            saved.kept = None
            return part
        if self.parts > 1:
            gathered = torch.empty(part.numel() * self.parts, dtype=part.dtype, device=part.device)
            self.tp.all_gather(gathered, part, purpose="checkpoints").wait()
            saved.drop()
            part = gathered
        return part[: saved.shape.numel()].view(saved.shape)

    def free(self, saved: ActivationCheckpoint) -> None:
        """Free the saved tensor of a checkpoint, after the last use of the tensor that `load` returned."""
        saved.drop()

    def _allocate(self, size: int, like: Tensor, saved: ActivationCheckpoint) -> Tensor:
        """Return memory for an activation checkpoint of `size` elements."""
        make = storage.empty_on_host if self.offload else storage.empty
        category = Category.HOST if self.offload else Category.CHECKPOINTS
        if not self.contiguous:
            return make(size, like, category)
        if self.arena is None:
            piece = -(-size // ALIGNMENT) * ALIGNMENT
            self.arena = Arena(make(self.capacity * piece, like, category), [piece] * self.capacity)
        saved.arena, saved.piece = self.arena, self.arena.take(size)
        return saved.piece.tensor

    def _fetch(self, saved: ActivationCheckpoint) -> None:
        """Start to copy an activation checkpoint from the host to the device, unless the copy has begun."""
        if saved.kept is None:
            return
        like = torch.empty(0, dtype=saved.kept.dtype, device=saved.device)
        saved.fetched = storage.empty(saved.kept.numel(), like, Category.CHECKPOINTS)
        stream = self._copy_stream(saved.fetched)
        if stream is None:
            saved.fetched.copy_(saved.kept)
        else:
            stream.wait_stream(torch.cuda.current_stream(saved.device))
            with torch.cuda.stream(stream):
                saved.fetched.copy_(saved.kept, non_blocking=True)
                saved.ready = stream.record_event()
            saved.fetched.record_stream(stream)
        # The host memory can be reused, because later copies to it follow on the same stream.
        saved.drop()

    def _copy_stream(self, x: Tensor) -> torch.cuda.Stream | None:
        """Return the CUDA stream of copies to and from host memory; None on other devices."""
        if x.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        return self._stream


Block = Callable[[Tensor], Tensor]


class _Recompute(torch.autograd.Function):
    """Transformer block that is recomputed in backward; the autograd graph references only its input's checkpoint."""

    @staticmethod
    def forward(
        ctx: Any,
        block: Block,
        checkpoints: ActivationCheckpoints,
        saved: ActivationCheckpoint,
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor:
        ctx.block, ctx.checkpoints, ctx.checkpoint = block, checkpoints, saved
        return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.checkpoints.load(ctx.checkpoint).requires_grad_(ctx.needs_input_grad[4])
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradients[0])
        ctx.checkpoints.free(ctx.checkpoint)
        return None, None, None, None, x.grad


def recompute(block: Block, x: Tensor, checkpoints: ActivationCheckpoints) -> Tensor:
    """Return `block(x)`, and retain only a checkpoint of `x` [b, s, h] for backward, which runs `block` again.

    The gradients of the block's parameters arrive during the backward pass, as without recomputation. Backward can run
    only once. The random numbers of blocks are functions of counters, so there is no generator state to save.
    """
    if not torch.is_grad_enabled():
        return block(x)
    # Autograd needs an input that requires a gradient, even if x is data and requires none.
    with storage.unobserved(x.device):
        anchor = torch.empty(0, device=x.device, requires_grad=True)
    # The next checkpoint in backward is that of the block that produced x, which is not always the last saved one.
    before = getattr(x.grad_fn, "checkpoint", None)
    return _Recompute.apply(block, checkpoints, checkpoints.save(x, before), anchor, x)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _RecomputeAttention(torch.autograd.Function):
    """Attention core that is recomputed in backward. The autograd graph references only queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.attend = attend
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.attend(*inputs)
        ctx.attend = None  # Free the tensors that the function `attend` references.
        return None, *torch.autograd.grad(y, inputs, gradients)


def recompute_attention(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `attend(q, k, v)` on heads [b, a/t, s, d]; backward runs `attend` again (2205.05198 sec. 5).

    `attend` must use no parameter. Its dropout uses counter-based random numbers, so that a rerun drops equal weights.
    """
    return _RecomputeAttention.apply(attend, q, k, v)
