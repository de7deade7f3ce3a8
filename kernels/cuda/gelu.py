"""Binding of `gelu.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda import columns as sums
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, aligned, type_of


@cache
def program(kind: str, bias: str, width: int) -> Program:
    """For rows that are read by `width` elements at once."""
    definitions = (("TYPE", kind), ("BIAS", bias), ("WIDTH", width))
    return Program("gelu", definitions, struct.Struct("@PPPPPqii"), ("forward", "backward"), 256)


def examples() -> list[Program]:
    """In 16 bits, and rows of odd length."""
    return [program("bfloat16", "bfloat16", 8), program("half", "half", 1)]


def _program(x: Tensor, bias: Tensor, others: tuple[Tensor, ...], columns: int) -> tuple[Program, int]:
    width = 16 // x.element_size()
    if not aligned(columns, (x, bias, *others), width):
        width = 1
    return program(type_of(x), type_of(bias), width), width


def bias_gelu(on: KernelLauncher, x: Tensor, bias: Tensor) -> Tensor:
    """y."""
    x, bias = x.contiguous(), bias.contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    if x.numel():
        kind, width = _program(x, bias, (y,), columns)
        rows = x.numel() // columns
        blocks, at_once = sums.spread(on, rows, columns, width, kind.threads)
        arguments = (x.data_ptr(), bias.data_ptr(), 0, y.data_ptr(), 0, rows, columns, at_once)
        on.load(kind).launch("forward", blocks, kind.arguments.pack(*arguments))
    return y


def bias_gelu_backward(on: KernelLauncher, grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dbias."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    if grad.dtype != x.dtype:
        raise Unavailable("bias_gelu_backward needs a gradient of the dtype of x")
    dx, columns = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, torch.zeros_like(bias)
    kind, width = _program(x, bias, (grad, dx), columns)
    loaded, adding = on.load(kind), on.load(sums.program(type_of(bias)))
    rows = x.numel() // columns
    blocks, at_once = sums.spread(on, rows, columns, width, kind.threads)
    partials = x.new_empty(1, at_once, columns, dtype=torch.float32)
    pointers = (x.data_ptr(), bias.data_ptr(), grad.data_ptr(), dx.data_ptr(), partials.data_ptr())
    loaded.launch("backward", blocks, kind.arguments.pack(*pointers, rows, columns, at_once))
    return dx, sums.column_sums(adding, partials, bias.dtype)
