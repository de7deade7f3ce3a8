"""Fused bias, dropout and residual: y = residual + dropout(x + bias).

The mask depends on the token's row number in the global batch (`repro.kernels.random`), so every layout drops the same
elements. Backward recomputes the mask from the key.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels import column_sums as sums
from repro.kernels import random
from repro.kernels.column_sums import sum_rows
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, pointer, read_width, source_type
from repro.kernels.library import Cost, Operand, accumulation_dtype, like_first, operator, row_chunks


class Place(NamedTuple):
    """Position of a rank's activations [b, s, h] in the global batch, as arguments of `bias_dropout_residual`."""

    first_sample: int
    seq: int
    first_position: int
    split: int = 0
    jump: int = 0
    device_key: Tensor | None = None


@cache
def program(kind: str, bias: str, residual: bool, drop: bool, width: int) -> Program:
    """Return the CUDA program of bias, dropout and residual; a thread reads `width` elements at once.

    `kind` and `bias`: types of x and of the bias; an empty `bias` means no bias. `residual`, `drop`: whether the kernel
    adds a residual and applies dropout.
    """
    flags = (("HAS_BIAS", int(bool(bias))), ("HAS_RESIDUAL", int(residual)), ("DROP", int(drop)))
    definitions = (("TYPE", kind), ("BIAS", bias or "float"), *flags, ("WIDTH", width))
    return Program(
        "dropout", definitions, struct.Struct("@PPPPPPQqIIqiiiiif0q"), ("forward", "backward"), 256
    )


def examples() -> list[Program]:
    """Return example CUDA programs of bias, dropout and residual: for bf16, and for fp32 rows of odd length."""
    return [program("bfloat16", "bfloat16", True, True, 8), program("float", "float", True, False, 1)]


def launch_bias_dropout_residual(
    on: KernelLauncher,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    *place: Any,
) -> Tensor:
    """Launch the fused kernel of bias, dropout and residual, and return y."""
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    if residual is not None and residual.dtype != x.dtype:
        raise Unavailable("bias_dropout_residual needs a residual of the dtype of x")
    y, kind_of_bias = torch.empty_like(x), "" if bias is None else source_type(bias)
    if x.numel():
        columns = x.shape[-1]
        width = read_width(columns, [t for t in (x, bias, residual, y) if t is not None])
        kind = program(source_type(x), kind_of_bias, residual is not None, p > 0, width)
        loaded, rows = on.load(kind), _count_rows(x)
        blocks, at_once = sums.row_grid(on, rows, columns, width, kind.threads)
        pointers = [pointer(t) for t in (x, bias, residual, y)]
        at = Place(*place)
        numbers = _scalar_arguments(p, key, at, x.shape[1], rows, columns, at_once)
        loaded.launch("forward", blocks, kind.arguments.pack(*pointers, 0, pointer(at.device_key), *numbers))
    return y


def launch_bias_dropout_residual_backward(
    on: KernelLauncher, grad: Tensor, has_bias: bool, p: float, key: int, *place: Any
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels of bias and dropout; return the gradients of x and of any bias (else empty)."""
    grad = grad.contiguous()
    dx, columns = torch.empty_like(grad), grad.shape[-1]
    if not grad.numel():
        return dx, grad.new_zeros(columns if has_bias else 0)
    width = read_width(columns, [grad, dx])
    kind = program(source_type(grad), source_type(grad) if has_bias else "", False, True, width)
    loaded, rows = on.load(kind), _count_rows(grad)
    adding = on.load(sums.program(source_type(grad))) if has_bias else None
    blocks, at_once = sums.row_grid(on, rows, columns, width, kind.threads)
    partials = None if adding is None else grad.new_empty(1, at_once, columns, dtype=torch.float32)
    pointers = (grad.data_ptr(), 0, 0, dx.data_ptr(), pointer(partials))
    at = Place(*place)
    numbers = _scalar_arguments(p, key, at, grad.shape[1], rows, columns, at_once)
    loaded.launch("backward", blocks, kind.arguments.pack(*pointers, pointer(at.device_key), *numbers))
    if adding is None or partials is None:
        return dx, grad.new_empty(0)
    return dx, sums.launch_column_sums(adding, partials, grad.dtype)


def _count_rows(x: Tensor) -> int:
    rows = x.numel() // x.shape[-1]
    if rows >= 2**31:
        raise Unavailable(f"bias_dropout_residual needs fewer than 2**31 rows, not {rows}")
    return rows


def _scalar_arguments(
    p: float, key: int, at: Place, positions: int, rows: int, columns: int, at_once: int
) -> tuple[int | float, ...]:
    """Return the numbers that follow the pointers in the dropout kernel's arguments, in the order of its struct."""
    origin = at.first_position + (at.first_sample * at.seq if at.device_key is None else 0)
    sizes = (origin, rows, positions, at.seq, at.split, at.jump, columns, at_once)
    return (random.mixed(key), *sizes, random.threshold(p), 1 / (1 - p))


def _global_rows(x: Tensor, place: Place) -> Tensor:
    """Return the row number in the global batch of every token of x [b, s, h], int64 [b * s].

    The number of sample i and position j is (first_sample + i) * seq + first_position + j, plus `jump` for j >= split.
    Raises RuntimeError for a key in device memory, which only the CUDA kernel supports.
    """
    (first_sample, seq, first_position, split, jump, device_key), (samples, positions, _) = place, x.shape
    if device_key is not None:
        raise RuntimeError(
            "dropout with a key in device memory needs the CUDA kernel, which is not available"
        )
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
    *further: Any,
) -> Tensor:
    """Compute bias, dropout and residual with plain torch operators in the dtype of the arguments."""
    y = x if bias is None else x + bias
    if training and p > 0:
        rows = _global_rows(x, Place(first_sample, seq, first_position, *further))
        keep = random.keep_mask(rows, x.shape[-1], p, key)
        y = torch.where(keep.view(x.shape), y / (1 - p), 0.0)
    return y if residual is None else residual + y


def _forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, key: int, *place: Any
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
    words = random.factors(_global_rows(x, Place(*place)), columns, key)
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
    """Return the dropout mask of rows first to last - 1 as numbers 0 and 1, which are fast on a CPU."""
    row_low, row_odd, column_low, column_even = words
    bits = random.combine(row_low[first:last], row_odd[first:last], column_low, column_even)
    return bits.ge_(random.threshold(p)).to(dtype)


def _backward(grad: Tensor, has_bias: bool, p: float, key: int, *place: Any) -> tuple[Tensor, Tensor]:
    columns = grad.shape[-1]
    dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    out, flat = dx.view(-1, columns), grad.contiguous().view(-1, columns)
    wide = accumulation_dtype(grad.dtype)
    words = random.factors(_global_rows(grad, Place(*place)), columns, key)
    for first, last in row_chunks(flat.shape[0], flat.shape[1], grad.device):
        keep = _keep(words, first, last, p, wide).mul_(1 / (1 - p))
        if grad.dtype == wide:
            torch.mul(flat[first:last], keep, out=out[first:last])
        else:
            out[first:last].copy_(keep.mul_(flat[first:last]))
    return dx, out.sum(0) if has_bias else grad.new_empty(0)


def _backward_shape(grad: Tensor, has_bias: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[-1] if has_bias else 0)


forward_operator = operator(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, float p, int key,"
    " int first_sample, int seq, int first_position, int split=0, int jump=0, Tensor? device_key=None) -> Tensor",
    _forward,
    like_first,
    launch_bias_dropout_residual,
)
backward_operator = operator(
    "bias_dropout_residual_backward(Tensor grad, bool has_bias, float p, int key,"
    " int first_sample, int seq, int first_position, int split=0, int jump=0, Tensor? device_key=None)"
    " -> (Tensor dx, Tensor dbias)",
    _backward,
    _backward_shape,
    launch_bias_dropout_residual_backward,
)


class _BiasDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, plain: bool, p: float, *place: Any
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
                dbias = sum_rows(grad, plain=ctx.plain)
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
    device_key: Tensor | None = None,
    plain: bool = False,
) -> Tensor:
    """Return y = residual + dropout(x + bias), [b, s, h] as x; bias is [h], residual [b, s, h], both optional.

    `random.keep_mask` decides on element (i, j, c) at row (first_sample + i) * seq + first_position + j and column c.
    `first_sample` is the index of the first sample in the global batch and `seq` the length of a full sequence.
    `first_position` is the position of the rank's first token in the sequence. For j >= `split`, row numbers are larger
    by `jump` (context parallelism). Retained elements are scaled by 1 / (1 - p). Backward saves no tensor.
    `device_key`: int64 [2] of `random.device_key` in GPU memory, which replaces `key` and `first_sample`, so that each
    replay of a CUDA graph reads new values. `plain`: use torch's operators on every device. Raises ValueError if the
    sizes do not agree or p is not in [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} must be at least 0 and less than 1")
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
    place = Place(first_sample, seq, first_position, split, jump, device_key)
    return _BiasDropoutResidual.apply(x, bias, residual, plain, rate, key, *place)


def forward_cost(
    x: Operand, bias: Operand | None, residual: Operand | None, p: float = 0.0, *_: object
) -> Cost:
    """Return the cost of bias, dropout and residual: 1 FLOP per element for each; the mask needs no memory traffic."""
    per_element = (bias is not None) + (residual is not None) + (p > 0)
    read = x.nbytes + sum(operand.nbytes for operand in (bias, residual) if operand is not None)
    return Cost(per_element * x.numel, read, x.nbytes)


def backward_cost(grad: Operand, has_bias: bool = True, *_: object) -> Cost:
    """Return the cost of dropout's backward pass: 1 FLOP per element for the scale, and 1 for the bias gradient."""
    bias_bytes = grad.shape[-1] * grad.itemsize if has_bias else 0
    return Cost((1 + has_bias) * grad.numel, grad.nbytes, grad.nbytes + bias_bytes)
