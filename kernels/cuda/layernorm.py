"""Binding of `layernorm.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda import columns as sums
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, aligned, type_of

BLOCKS_FORWARD, THREADS_BACKWARD = 64, 1024
"""Most blocks, and threads that the registers of backward allow, on a multiprocessor."""


@cache
def program(kind: str, weight: str, columns: int, width: int, backward: bool) -> Program:
    """For rows of so many columns, read by `width` elements at once.

    In backward a thread also holds two sums for each element of its own, hence half as many.
    """
    most, threads = (16, 512) if backward else (32, 1024)
    shape = sums.row_shape(columns, width, most, threads)
    if shape is None:
        name = "layer_norm_backward" if backward else "layer_norm"
        raise Unavailable(f"{name} holds rows of up to {most * threads} columns, not {columns}")
    types = (("TYPE", kind), ("WEIGHT", weight))
    definitions = (*types, ("BACKWARD", int(backward)), ("WIDTH", width), ("ITEMS", shape[1]))
    kernel = "backward" if backward else "forward"
    return Program("layernorm", definitions, struct.Struct("@8Pqif"), (kernel,), shape[0])


def examples() -> list[Program]:
    """Turing-NLG 17B in bf16, Megatron 8.3B in fp16, and long rows in fp32."""
    usual = [
        ("bfloat16", "bfloat16", 4256, 8),
        ("half", "float", 3072, 8),
        ("float", "float", 8192, 4),
    ]
    return [
        program(kind, weight, columns, width, backward)
        for kind, weight, columns, width in usual
        for backward in (False, True)
    ]


def _program(x: Tensor, weight: Tensor, others: list[Tensor], *, backward: bool) -> Program:
    columns, width = x.shape[-1], 16 // x.element_size()
    whole = aligned(columns, [x, weight, *others], width)
    return program(type_of(x), type_of(weight), columns, width if whole else 1, backward)


def layer_norm(
    on: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if bias.dtype != weight.dtype:
        raise Unavailable("layer_norm needs weight and bias of one dtype")
    *shape, columns = x.shape
    y = torch.empty_like(x)
    mean = x.new_empty(*shape, 1, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if size := x.numel():
        kind = _program(x, weight, [bias, y], backward=False)
        pointers = (x.data_ptr(), 0, y.data_ptr(), weight.data_ptr(), bias.data_ptr())
        rows = size // columns
        ends = (mean.data_ptr(), rstd.data_ptr(), 0, rows, columns, eps)
        blocks = min(rows, BLOCKS_FORWARD * on.processors)
        on.load(kind).launch("forward", blocks, kind.arguments.pack(*pointers, *ends))
    return y, mean, rstd


def layer_norm_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    if grad.dtype != x.dtype or mean.dtype != torch.float32:
        raise Unavailable("layer_norm_backward needs a gradient of the dtype of x and statistics in fp32")
    mean, rstd = mean.contiguous(), rstd.contiguous()
    dx, columns = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    kind = _program(x, weight, [grad, dx], backward=True)
    loaded, rows = on.load(kind), x.numel() // columns
    adding = on.load(sums.program(type_of(weight)))
    blocks = min(rows, max(1, THREADS_BACKWARD // kind.threads) * on.processors)
    partials = mean.new_empty(2, blocks, columns)
    pointers = (x.data_ptr(), grad.data_ptr(), dx.data_ptr(), weight.data_ptr(), 0)
    ends = (mean.data_ptr(), rstd.data_ptr(), partials.data_ptr(), rows, columns, 0.0)
    loaded.launch("backward", blocks, kind.arguments.pack(*pointers, *ends))
    dweight, dbias = sums.column_sums(adding, partials, weight.dtype).unbind()
    return dx, dweight, dbias
