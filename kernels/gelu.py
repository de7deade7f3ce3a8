"""Bias and tanh GELU in one step: y = gelu(x + bias); backward recomputes x + bias instead of saving it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels.cuda import gelu as cuda
from repro.kernels.library import Cost, Operand, column_sums, operator


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """The definition, in the dtype of the arguments."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(torch.add(x.contiguous(), bias.to(x.dtype)), approximate="tanh")


def _backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.add(x.contiguous(), bias.to(x.dtype))
    dx = torch.ops.aten.gelu_backward.grad_input(grad.contiguous(), u, approximate="tanh", grad_input=u)
    return dx, column_sums(_rows(dx), bias.dtype)


def _forward_shape(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward_shape(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(bias)


forward_operator = operator(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor", _forward, _forward_shape, cuda.bias_gelu
)
backward_operator = operator(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor dx, Tensor dbias)",
    _backward,
    _backward_shape,
    cuda.bias_gelu_backward,
)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, plain: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.plain = plain
        return (_forward if plain else forward_operator)(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*(_backward if ctx.plain else backward_operator)(grad, *ctx.saved_tensors), None)


def bias_gelu(x: Tensor, bias: Tensor, *, plain: bool = False) -> Tensor:
    """y [..., f] in the dtype of x [..., f]; bias is [f]. Saved for backward: x and bias, nothing else.

    `plain`: by torch's operators on every device. Raises ValueError when the sizes do not agree.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias_gelu of {list(x.shape)} needs a bias of {list(x.shape[-1:])}, not {list(bias.shape)}"
        )
    return _BiasGelu.apply(x, bias, plain)


def forward_cost(x: Operand, bias: Operand) -> Cost:
    """8 per element: bias 1, u + 0.044715 u^3 4, scale 1, sigmoid 1, product 1."""
    return Cost(8 * x.numel, x.nbytes + bias.nbytes, x.nbytes)


def backward_cost(grad: Operand, x: Operand, bias: Operand) -> Cost:
    """17 per element: the gate 7, its slope 8, times the gradient 1, dbias 1."""
    return Cost(17 * x.numel, grad.nbytes + x.nbytes + bias.nbytes, x.nbytes + bias.nbytes)
