"""Root mean square normalisation over the last dimension (1910.07467): y = x * rstd * weight, rstd = 1 / rms(x)."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.kernels import layernorm as cuda
from repro.kernels.library import (
    Cost,
    Differentiable,
    Operand,
    accumulation_dtype,
    flatten_rows,
    operator,
    row_chunks,
)


def reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute RMS norm with plain torch operators in the dtype of the arguments."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_shape(x, weight, eps)
    given, out, statistics, wide = flatten_rows(x), flatten_rows(y), rstd.view(-1, 1), weight.to(rstd.dtype)
    for first, last in row_chunks(given.shape[0], given.shape[1], x.device):
        rows = given[first:last].to(wide.dtype)
        scale = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        statistics[first:last].copy_(scale)
        out[first:last].copy_((rows * scale).mul_(wide))
    return y, rstd


def _forward_shape(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


def _backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx, wide = x.new_empty(x.shape), weight.to(rstd.dtype)
    grads, given, out, statistics = flatten_rows(grad), flatten_rows(x), flatten_rows(dx), rstd.reshape(-1, 1)
    dweight = torch.zeros_like(wide)
    for first, last in row_chunks(given.shape[0], given.shape[1], x.device):
        scale, slope = statistics[first:last], grads[first:last].to(wide.dtype)
        xhat = given[first:last].to(wide.dtype) * scale
        dweight += (slope * xhat).sum(0)
        slope = slope * wide
        mean = (slope * xhat).mean(-1, keepdim=True)
        out[first:last].copy_(slope.addcmul_(xhat, mean, value=-1).mul_(scale))
    return dx, dweight.to(weight.dtype)


def _backward_shape(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


forward_operator = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    _forward,
    _forward_shape,
    cuda.launch_rms_norm,
)
backward_operator = operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor weight) -> (Tensor dx, Tensor dweight)",
    _backward,
    _backward_shape,
    cuda.launch_rms_norm_backward,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, plain: bool = False) -> Tensor:
    """Return RMS norm y [..., h] in the dtype of x [..., h]; weight is [h] of any floating dtype.

    Backward saves x, weight, and rstd of every row ([..., 1], fp32; fp64 for fp64 x). `plain`: use torch's operators on
    every device. Raises ValueError if the sizes do not agree.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm of {list(x.shape)} needs a weight of {list(x.shape[-1:])}, not {list(weight.shape)}"
        )
    forward, backward = (_forward, _backward) if plain else (forward_operator, backward_operator)
    saved = (0, 3, 1)  # indices of x, rstd and weight in (*inputs, *results) of the forward pass
    return Differentiable.apply(
        lambda x, weight: forward(x, weight, eps),
        lambda grad, *saved: backward(grad, *saved),
        saved,
        x,
        weight,
    )


def forward_cost(x: Operand, weight: Operand, *_: object) -> Cost:
    """Return RMS norm's cost: 4 FLOP per element (square and sum 2, normalise 1, weight 1), and 3 per row for rstd."""
    rows = x.numel // max(1, weight.numel)
    return Cost(4 * x.numel + 3 * rows, x.nbytes + weight.nbytes, x.nbytes + 4 * rows)


def backward_cost(grad: Operand, x: Operand, rstd: Operand, weight: Operand) -> Cost:
    """Return RMS norm's backward cost: 9 FLOP per element (x * rstd 1, dweight 2, scaled grad 1, row sum 2, dx 3)."""
    read = grad.nbytes + x.nbytes + rstd.nbytes + weight.nbytes
    return Cost(9 * x.numel, read, x.nbytes + weight.nbytes)
