"""Activation recomputation, one checkpoint per block (1910.02054 sec. 3.2; Chen et al. 2016).

Forward keeps a block's input and throws its activations away; backward runs the block's forward again.
How the input is kept is up to `zero_r.partitioned_activations`.  The blocks' random numbers are functions
of counters, so there is no generator state to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from repro.parallel.zero_r.partitioned_activations import Checkpoints, Saved

Block = Callable[[Tensor], Tensor]


class _Recompute(torch.autograd.Function):
    """Holds the checkpoint, and of its input no more than the edge of the graph."""

    @staticmethod
    def forward(
        ctx: Any, block: Block, checkpoints: Checkpoints, saved: Saved, anchor: Tensor, x: Tensor
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


def recompute(block: Block, x: Tensor, checkpoints: Checkpoints) -> Tensor:
    """`block(x)`, keeping only a checkpoint of `x` [b, s, h] for backward, which runs `block` again.

    The parameters' gradients arrive during the backward pass, as without recomputation.  Backward runs
    once.
    """
    if not torch.is_grad_enabled():
        return block(x)
    # Autograd needs an input that requires a gradient even when x is data.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    # Backward comes from here to the block that made x; pipelines may run other passes in between.
    before = getattr(x.grad_fn, "checkpoint", None)
    return _Recompute.apply(block, checkpoints, checkpoints.save(x, before), anchor, x)
