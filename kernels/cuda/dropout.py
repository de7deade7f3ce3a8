"""Binding of `dropout.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels import random
from repro.kernels.cuda import columns as sums
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, aligned, type_of


@cache
def program(kind: str, bias: str, residual: bool, drop: bool, width: int) -> Program:
    """For rows that are read by `width` elements at once; no bias where `bias` is empty."""
    flags = (("HAS_BIAS", int(bool(bias))), ("HAS_RESIDUAL", int(residual)), ("DROP", int(drop)))
    definitions = (("TYPE", kind), ("BIAS", bias or "float"), *flags, ("WIDTH", width))
    return Program("dropout", definitions, struct.Struct("@PPPPPQqIIqiiiiif0q"), ("forward", "backward"), 256)


def examples() -> list[Program]:
    """In 16 bits, and rows of odd length."""
    return [program("bfloat16", "bfloat16", True, True, 8), program("float", "float", True, False, 1)]


def bias_dropout_residual(
    on: KernelLauncher,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    first_sample: int,
    seq: int,
    first_position: int,
    split: int = 0,
    jump: int = 0,
) -> Tensor:
    """y."""
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    if residual is not None and residual.dtype != x.dtype:
        raise Unavailable("bias_dropout_residual needs a residual of the dtype of x")
    y, kind_of_bias = torch.empty_like(x), "" if bias is None else type_of(bias)
    if x.numel():
        columns, width = x.shape[-1], 16 // x.element_size()
        if not aligned(columns, [t for t in (x, bias, residual, y) if t is not None], width):
            width = 1
        kind = program(type_of(x), kind_of_bias, residual is not None, p > 0, width)
        loaded, rows = on.load(kind), _rows(x)
        blocks, at_once = sums.spread(on, rows, columns, width, kind.threads)
        pointers = [0 if t is None else t.data_ptr() for t in (x, bias, residual, y)]
        origin = first_sample * seq + first_position
        place = _place(p, key, origin, rows, x.shape[1], seq, split, jump, columns, at_once)
        loaded.launch("forward", blocks, kind.arguments.pack(*pointers, 0, *place))
    return y


def bias_dropout_residual_backward(
    on: KernelLauncher,
    grad: Tensor,
    has_bias: bool,
    p: float,
    key: int,
    first_sample: int,
    seq: int,
    first_position: int,
    split: int = 0,
    jump: int = 0,
) -> tuple[Tensor, Tensor]:
    """dx and dbias, which is empty without a bias."""
    grad = grad.contiguous()
    dx, columns = torch.empty_like(grad), grad.shape[-1]
    if not grad.numel():
        return dx, grad.new_zeros(columns if has_bias else 0)
    width = 16 // grad.element_size()
    width = width if aligned(columns, [grad, dx], width) else 1
    kind = program(type_of(grad), type_of(grad) if has_bias else "", False, True, width)
    loaded, rows = on.load(kind), _rows(grad)
    adding = on.load(sums.program(type_of(grad))) if has_bias else None
    blocks, at_once = sums.spread(on, rows, columns, width, kind.threads)
    partials = None if adding is None else grad.new_empty(1, at_once, columns, dtype=torch.float32)
    pointers = (grad.data_ptr(), 0, 0, dx.data_ptr(), 0 if partials is None else partials.data_ptr())
    origin = first_sample * seq + first_position
    place = _place(p, key, origin, rows, grad.shape[1], seq, split, jump, columns, at_once)
    loaded.launch("backward", blocks, kind.arguments.pack(*pointers, *place))
    if adding is None or partials is None:
        return dx, grad.new_empty(0)
    return dx, sums.column_sums(adding, partials, grad.dtype)


def _rows(x: Tensor) -> int:
    rows = x.numel() // x.shape[-1]
    if rows >= 2**31:
        raise Unavailable(f"bias_dropout_residual counts rows in 31 bits, and there are {rows}")
    return rows


def _place(p: float, key: int, *place: int) -> tuple[int | float, ...]:
    """What follows the pointers in the arguments."""
    return (random.mixed(key), *place, random.threshold(p), 1 / (1 - p))
