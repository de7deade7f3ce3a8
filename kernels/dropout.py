"""Bias, dropout and residual in one step: y = residual + dropout(x + bias).

The mask comes from `repro.kernels.random`, at the row number of the token in the *global* batch, so every
layout drops the same elements. Only the key is kept: backward computes the mask again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels import random
from repro.kernels.cuda import dropout as cuda
from repro.kernels.library import Cost, Operand, accumulation_dtype, column_sums, operator, row_chunks


def global_rows(
    x: Tensor, first_sample: int, seq: int, first_position: int, split: int = 0, jump: int = 0
) -> Tensor:
    """Row numbers (first_sample + i) * seq + first_position + j of x [b, s, h], int64 [b * s].

    From j = split on they are `jump` larger.
    """
    samples, positions = x.shape[0], x.shape[1]
    origin = first_sample * seq + first_position
    if not jump and (samples == 1 or positions == seq):
        return torch.arange(origin, origin + samples * positions, device=x.device)
    start = torch.arange(origin, origin + samples * seq, seq, device=x.device)
    rows = torch.arange(positions, device=x.device)
    if jump:
        rows[split:] += jump
    return torch.add(start[:, None], rows).view(-1)


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    first_sample: int,
    seq: int,
    first_position: int,
    training: bool,
    split: int = 0,
    jump: int = 0,
) -> Tensor:
    """The definition, in the dtype of the arguments."""
    y = x if bias is None else x + bias
    if training and p > 0:
        keep = random.keep_mask(
            global_rows(x, first_sample, seq, first_position, split, jump), x.shape[-1], p, key
        )
        y = torch.where(keep.view(x.shape), y / (1 - p), 0.0)
    return y if residual is None else residual + y


def _forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    *place: int,
) -> Tensor:
    if p == 0:
        y = x.contiguous() if bias is None else torch.add(x.contiguous(), bias.to(x.dtype))
        if residual is None:
            return y.clone() if bias is None else y
        return torch.add(residual, y) if bias is None else y.add_(residual)
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out, flat = y.view(-1, columns), x.contiguous().view(-1, columns)
    base = None if residual is None else residual.contiguous().view(-1, columns)
    wide = accumulation_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(wide)
    words = random.factors(global_rows(x, *place), columns, key)
    for first, last in row_chunks(flat.shape[0], flat.shape[1], x.device):
        keep = _keep(words, first, last, p, wide)
        value = flat[first:last].to(wide) if wide_bias is None else flat[first:last] + wide_bias
        target = out[first:last] if x.dtype == wide else keep
        if base is None:
            torch.mul(value, keep, out=target).mul_(1 / (1 - p))
        else:
            torch.addcmul(base[first:last].to(wide), value, keep, value=1 / (1 - p), out=target)
        if target is keep:
            out[first:last].copy_(keep)
    return y


def _keep(words: tuple[Tensor, ...], first: int, last: int, p: float, dtype: torch.dtype) -> Tensor:
    """The mask of some rows as numbers 0 and 1: torch is slow with bool on a CPU."""
    row_low, row_odd, column_low, column_even = words
    bits = random.combine(row_low[first:last], row_odd[first:last], column_low, column_even)
    return bits.ge_(random.threshold(p)).to(dtype)


def _backward(grad: Tensor, has_bias: bool, p: float, key: int, *place: int) -> tuple[Tensor, Tensor]:
    columns = grad.shape[-1]
    dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    out, flat = dx.view(-1, columns), grad.contiguous().view(-1, columns)
    wide = accumulation_dtype(grad.dtype)
    words = random.factors(global_rows(grad, *place), columns, key)
    for first, last in row_chunks(flat.shape[0], flat.shape[1], grad.device):
        keep = _keep(words, first, last, p, wide).mul_(1 / (1 - p))
        if grad.dtype == wide:
            torch.mul(flat[first:last], keep, out=out[first:last])
        else:
            out[first:last].copy_(keep.mul_(flat[first:last]))
    return dx, column_sums(out, grad.dtype) if has_bias else grad.new_empty(0)


def _forward_shape(x: Tensor, bias: Tensor | None, residual: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward_shape(grad: Tensor, has_bias: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[-1] if has_bias else 0)


forward_operator = operator(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, float p, int key,"
    " int first_sample, int seq, int first_position, int split=0, int jump=0) -> Tensor",
    _forward,
    _forward_shape,
    cuda.bias_dropout_residual,
)
backward_operator = operator(
    "bias_dropout_residual_backward(Tensor grad, bool has_bias, float p, int key,"
    " int first_sample, int seq, int first_position, int split=0, int jump=0) -> (Tensor dx, Tensor dbias)",
    _backward,
    _backward_shape,
    cuda.bias_dropout_residual_backward,
)


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, plain: bool, p: float, *place: int
    ) -> Tensor:
        ctx.p, ctx.place, ctx.plain = p, place, plain
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.has_residual = residual is not None
        return (_forward if plain else forward_operator)(x, bias, residual, p, *place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dbias: Tensor | None = None
        if ctx.p == 0:
            dx = grad
            if ctx.bias_dtype is not None:
                dbias = grad.flatten(0, -2).sum(0)
        else:
            backward = _backward if ctx.plain else backward_operator
            dx, dbias = backward(grad, ctx.bias_dtype is not None, ctx.p, *ctx.place)
        dbias = None if dbias is None or ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
        return dx, dbias, grad if ctx.has_residual else None, *[None] * (3 + len(ctx.place))


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    first_sample: int,
    seq: int,
    first_position: int,
    training: bool,
    split: int = 0,
    jump: int = 0,
    *,
    plain: bool = False,
) -> Tensor:
    """y = residual + dropout(x + bias), [b, s, h] as x; bias is [h], residual [b, s, h], both optional.

    Element (i, j, c) is dropped by `random.keep_mask` at row (first_sample + i) * seq + first_position + j,
    column c: `first_sample` is the number of the first sample in the global batch, `seq` the length of a
    whole sequence and `first_position` where this rank's part of it begins (0 where it has all of it); from
    j = `split` on the part goes on `jump` rows further (context parallelism). Kept elements are scaled by
    1 / (1 - p). With p == 0 or not training it is an addition. Nothing is saved for backward. `plain`: by
    torch's operators on every device. Raises ValueError when the sizes do not agree or p is not in [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability is {p}, it must be at least 0 and less than 1")
    if x.dim() != 3 or (residual is not None and residual.shape != x.shape):
        other = None if residual is None else list(residual.shape)
        raise ValueError(
            f"bias_dropout_residual needs x and residual [b, s, h], not {list(x.shape)} and {other}"
        )
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias_dropout_residual of {list(x.shape)} cannot take a bias of {list(bias.shape)}")
    rate = p if training else 0.0
    if rate == 0.0 and bias is None and residual is None:
        return x
    place = (first_sample, seq, first_position, split, jump)
    return _BiasDropoutResidual.apply(x, bias, residual, plain, rate, key, *place)


def forward_cost(
    x: Operand, bias: Operand | None, residual: Operand | None, p: float = 0.0, *_: object
) -> Cost:
    """Per element: bias 1, scale and residual 1 each; the mask is integer work and moves no bytes."""
    per_element = (bias is not None) + (residual is not None) + (p > 0)
    read = x.nbytes + sum(operand.nbytes for operand in (bias, residual) if operand is not None)
    return Cost(per_element * x.numel, read, x.nbytes)


def backward_cost(grad: Operand, has_bias: bool = True, *_: object) -> Cost:
    """Per element: scale 1, dbias 1."""
    bias_bytes = grad.shape[-1] * grad.itemsize if has_bias else 0
    return Cost((1 + has_bias) * grad.numel, grad.nbytes, grad.nbytes + bias_bytes)
