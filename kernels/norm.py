"""Sum of squares of many tensors: the local part of a global gradient norm, and the overflow check in one."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.kernels.cuda import norm as cuda
from repro.kernels.library import Cost, Operand, operator

CHUNK = 2**18
"""Elements that a CPU works on at once: bounds the fp32 copy of 16-bit tensors (1 MiB)."""

ROW = 2**10
"""Elements that a CPU adds up one after the other: torch's norm of 4e6 equal numbers is wrong by 0.2 %."""


def reference(tensors: list[Tensor]) -> Tensor:
    """The definition, in the dtype of the arguments."""
    return torch.stack([t.square().sum() for t in tensors]).sum()


@torch.no_grad()
def _norm_squared(tensors: list[Tensor]) -> Tensor:
    # A foreach norm reads 16-bit tensors into fp32 registers: one kernel for all of them, no temporary.
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square_().sum()


@torch.no_grad()
def _norm_squared_cpu(tensors: list[Tensor]) -> Tensor:
    norms = []
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(CHUNK):
            wide = piece.float()
            whole = wide.numel() // ROW * ROW
            if whole:
                norms.append(torch.linalg.vector_norm(wide[:whole].view(-1, ROW), dim=1))
            if whole < wide.numel() or not whole:
                norms.append(torch.linalg.vector_norm(wide[whole:]).view(1))
    return torch.cat(norms).square_().sum()


def _shape(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


norm_operator = operator(
    "norm_squared(Tensor[] tensors) -> Tensor", _norm_squared, _shape, cuda.norm_squared, _norm_squared_cpu
)


def norm_squared(tensors: list[Tensor], *, plain: bool = False) -> Tensor:
    """Sum of the squares of all elements, 0-dim fp32, accumulated in fp32.

    The tensors may have any floating dtype and any shape. inf and nan in any element end up in the result,
    so `isfinite` of it is the overflow check. A finite value beyond 1.8e19 overflows too, as it does in any
    fp32 norm. `plain`: by torch's operators on every device. Raises ValueError for an empty list, which has no
    device.
    """
    if not tensors:
        raise ValueError(
            "norm_squared needs at least one tensor: an empty list does not say which device to use"
        )
    if plain:
        return (_norm_squared_cpu if tensors[0].device.type == "cpu" else _norm_squared)(tensors)
    return norm_operator(tensors)


def cost(tensors: list[Operand]) -> Cost:
    """2 per element: square and add."""
    return Cost(2 * sum(t.numel for t in tensors), sum(t.nbytes for t in tensors), 4)
