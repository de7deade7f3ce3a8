"""Layer normalisation over the last dimension: y = (x - mean) * rstd * weight + bias, statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels.cuda import layernorm as cuda
from repro.kernels.library import Cost, Operand, accumulation_dtype, operator


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The definition, in the dtype of the arguments."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd * weight + bias


def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    kind = _weight_dtype(x)
    y, mean, rstd = torch.native_layer_norm(x.contiguous(), weight.shape, weight.to(kind), bias.to(kind), eps)
    return y, mean, rstd


def _weight_dtype(x: Tensor) -> torch.dtype:
    """Of weights with which torch's operators keep the statistics of x in fp32.

    A GPU does with those of x's dtype and takes no others (pytorch/pytorch#135969); a CPU rounds, but for wide ones.
    """
    return accumulation_dtype(x.dtype) if x.device.type == "cpu" else x.dtype


def _forward_shape(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    given = weight.to(_weight_dtype(x))
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x.contiguous(), weight.shape, mean, rstd, given, given, [True, True, True]
    )
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _backward_shape(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight)


forward_operator = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    _forward,
    _forward_shape,
    cuda.layer_norm,
)
backward_operator = operator(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_shape,
    cuda.layer_norm_backward,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, plain: bool) -> Tensor:
        y, mean, rstd = (_forward if plain else forward_operator)(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.plain = plain
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(_backward if ctx.plain else backward_operator)(grad, *ctx.saved_tensors), None, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, plain: bool = False) -> Tensor:
    """y [..., h] in the dtype of x [..., h]; weight and bias are [h], of one dtype (any floating one).

    Saved for backward: x, weight, and mean and rstd of every row ([..., 1], fp32; fp64 for fp64 x).
    `plain`: by torch's operators on every device. Raises ValueError when the sizes do not agree.
    """
    if weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError(
            f"layer_norm of {list(x.shape)} needs weight and bias of {list(x.shape[-1:])}, "
            f"not {list(weight.shape)} and {list(bias.shape)}"
        )
    return _LayerNorm.apply(x, weight, bias, eps, plain)


def forward_cost(x: Operand, weight: Operand, bias: Operand, *_: object) -> Cost:
    """8 per element: mean 1, variance 3, normalise 2, affine 2; 4 per row. Statistics are 4 bytes each."""
    rows = x.numel // max(1, weight.numel)
    return Cost(8 * x.numel + 4 * rows, x.nbytes + weight.nbytes + bias.nbytes, x.nbytes + 2 * 4 * rows)


def backward_cost(grad: Operand, x: Operand, mean: Operand, rstd: Operand, weight: Operand) -> Cost:
    """14 per element: xhat 2, grad * weight 1, its two row sums 3, dx 4, dweight 2, dbias 1, rstd 1."""
    read = grad.nbytes + x.nbytes + mean.nbytes + rstd.nbytes + weight.nbytes
    return Cost(14 * x.numel, read, x.nbytes + 2 * weight.nbytes)
