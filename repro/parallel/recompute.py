"""Activation recomputation, one checkpoint per block (1910.02054 sec. 3.2; Chen et al. 2016).

Forward keeps a block's input and throws its activations away; backward runs the block's forward again.
The blocks' random numbers are functions of counters, so there is no generator state to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Block = Callable[[Tensor], Tensor]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Block, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_(saved.requires_grad)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradients[0])
        return None, None, x.grad


def recompute(block: Block, x: Tensor) -> Tensor:
    """``block(x)``, keeping only ``x`` [b, s, h] for the backward pass, which runs ``block`` again.

    The parameters' gradients arrive during the backward pass, as without recomputation.
    """
    # Autograd needs an input that requires a gradient even when x is data.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    return _Recompute.apply(block, anchor, x)
