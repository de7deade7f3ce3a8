"""Bias and tanh GELU in one step: y = gelu(x + bias); backward recomputes x + bias instead of saving it.

tanh GELU is u * sigmoid(2 k (u + 0.044715 u^3)) with k = sqrt(2 / pi): the same function as the usual u / 2
* (1 + tanh(k (u + 0.044715 u^3))) with a better tail. torch computes sigmoid several times faster than tanh
on a CPU, so the CPU implementation uses this form on chunks that stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels.cuda import gelu as cuda
from repro.kernels.library import Cost, Operand, accumulation_dtype, column_sums, operator, row_chunks

_TWO_K = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def reference(x: Tensor, bias: Tensor) -> Tensor:
    """The definition, in the dtype of the arguments."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(torch.add(x.contiguous(), bias.to(x.dtype)), approximate="tanh")


def _sum_and_gate(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u = x + bias, u^2 and sigmoid(2 k (u + 0.044715 u^3)) of a few rows, in the dtype of bias."""
    u = x + bias
    square = u * u
    gate = torch.addcmul(u, square, u, value=_CUBIC).mul_(_TWO_K).sigmoid_()
    return u, square, gate


def _forward_cpu(x: Tensor, bias: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    flat, out, wide = _rows(x), y.view(-1, x.shape[-1]), bias.to(accumulation_dtype(x.dtype))
    for first, last in row_chunks(flat.shape[0], flat.shape[1], x.device):
        u, _, gate = _sum_and_gate(flat[first:last], wide)
        if x.dtype == wide.dtype:
            torch.mul(u, gate, out=out[first:last])
        else:
            out[first:last].copy_(u.mul_(gate))
    return y


def _backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    u = torch.add(x.contiguous(), bias.to(x.dtype))
    dx = torch.ops.aten.gelu_backward.grad_input(grad.contiguous(), u, approximate="tanh", grad_input=u)
    return dx, column_sums(_rows(dx), bias.dtype)


def _backward_cpu(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype)
    flat, grads, out = _rows(x), _rows(grad), dx.view(-1, x.shape[-1])
    wide = bias.to(accumulation_dtype(x.dtype))
    for first, last in row_chunks(flat.shape[0], flat.shape[1], x.device):
        u, square, gate = _sum_and_gate(flat[first:last], wide)
        # d(u * gate) / du = gate + gate (1 - gate) * 2 k (u + 3 * 0.044715 u^3)
        inner = torch.addcmul(u, square, u, value=3 * _CUBIC, out=square)
        slope = torch.ops.aten.sigmoid_backward.grad_input(inner, gate, grad_input=u)
        slope = torch.add(gate, slope, alpha=_TWO_K, out=gate)
        if x.dtype == wide.dtype:
            torch.mul(slope, grads[first:last], out=out[first:last])
        else:
            out[first:last].copy_(slope.mul_(grads[first:last]))
    return dx, column_sums(out, bias.dtype)


def _forward_shape(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward_shape(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(bias)


forward_operator = operator(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor", _forward, _forward_shape, cuda.bias_gelu, _forward_cpu
)
backward_operator = operator(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor dx, Tensor dbias)",
    _backward,
    _backward_shape,
    cuda.bias_gelu_backward,
    _backward_cpu,
)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, plain: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.plain = plain
        return _plain(x.device)[0](x, bias) if plain else forward_operator(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        backward = _plain(grad.device)[1] if ctx.plain else backward_operator
        return (*backward(grad, *ctx.saved_tensors), None)


def _plain(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (_forward_cpu, _backward_cpu) if device.type == "cpu" else (_forward, _backward)


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
