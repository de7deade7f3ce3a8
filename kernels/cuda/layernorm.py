"""Binding of `layernorm.cu`, and of `layernorm_long.cu` for rows that a block cannot hold: layer norm and root mean
square norm."""

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
def program(
    kind: str, weight: str, columns: int, width: int, backward: bool, centred: bool = True
) -> Program:
    """For rows of so many columns, read by `width` elements at once; `centred`: with mean and bias.

    A thread holds up to 32 elements; in backward also two sums for each, hence half as many.  One that reads them
    singly also needs an address for each.  Rows of which a block cannot hold one have kernels for any length.
    """
    most, threads = (16, 512) if backward else (32, 512 if width == 1 else 1024)
    shape = sums.row_shape(columns, width, most, threads)
    kinds = (("TYPE", kind), ("WEIGHT", weight), ("CENTRED", int(centred)))
    if shape is None:
        kernels = ("forward", "means", "gradients")
        return Program("layernorm_long", (*kinds, ("WIDTH", width)), struct.Struct("@9Pqiif0q"), kernels, 256)
    definitions = (*kinds, ("BACKWARD", int(backward)), ("WIDTH", width), ("ITEMS", shape[1]))
    kernel = "backward" if backward else "forward"
    return Program("layernorm", definitions, struct.Struct("@8Pqif"), (kernel,), shape[0])


def examples() -> list[Program]:
    """Turing-NLG 17B in bf16, Megatron 8.3B in fp16, long rows in fp32; the root mean square of Llama 70B; rows of a
    trillion parameters."""
    usual = [
        ("bfloat16", "bfloat16", 4256, 8, True),
        ("half", "float", 3072, 8, True),
        ("float", "float", 8192, 4, True),
        ("bfloat16", "bfloat16", 8192, 8, False),
        ("half", "half", 25600, 8, True),
    ]
    return [
        program(kind, weight, columns, width, backward, centred)
        for kind, weight, columns, width, centred in usual
        for backward in (False, True)
    ]


def _width(x: Tensor, *others: Tensor) -> int:
    """Elements that a thread reads at once."""
    width = 16 // x.element_size()
    return width if aligned(x.shape[-1], [x, *others], width) else 1


def layer_norm(
    on: KernelLauncher, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd."""
    if bias.dtype != weight.dtype:
        raise Unavailable("layer_norm needs weight and bias of one dtype")
    mean = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    y, rstd = _forward(on, x, weight, eps, bias.contiguous(), mean)
    return y, mean, rstd


def rms_norm(on: KernelLauncher, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and rstd."""
    return _forward(on, x, weight, eps, None, None)


def _forward(
    on: KernelLauncher, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, mean: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    *shape, columns = x.shape
    y = torch.empty_like(x)
    rstd = x.new_empty(*shape, 1, dtype=torch.float32)
    if size := x.numel():
        width = _width(x, weight, y, *([] if bias is None else [bias]))
        kind = program(type_of(x), type_of(weight), columns, width, False, bias is not None)
        rows = size // columns
        pointers = (x.data_ptr(), 0, y.data_ptr(), weight.data_ptr(), _pointer(bias))
        statistics = (_pointer(mean), rstd.data_ptr())
        if kind.source == "layernorm":
            arguments = kind.arguments.pack(*pointers, *statistics, 0, rows, columns, eps)
        else:
            arguments = kind.arguments.pack(*pointers, *statistics, 0, 0, rows, columns, 0, eps)
        on.load(kind).launch("forward", min(rows, BLOCKS_FORWARD * on.processors), arguments)
    return y, rstd


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def layer_norm_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias."""
    dx, (dweight, dbias) = _backward(on, grad, x, mean.contiguous(), rstd, weight)
    return dx, dweight, dbias


def rms_norm_backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """dx and dweight."""
    dx, (dweight,) = _backward(on, grad, x, None, rstd, weight)
    return dx, dweight


def _backward(
    on: KernelLauncher, grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dx, and of weight and bias (of weight alone where there is no mean) the gradients."""
    name, vectors = ("rms_norm", 1) if mean is None else ("layer_norm", 2)
    grad, x, weight, rstd = grad.contiguous(), x.contiguous(), weight.contiguous(), rstd.contiguous()
    if grad.dtype != x.dtype or rstd.dtype != torch.float32:
        raise Unavailable(f"{name}_backward needs a gradient of the dtype of x and statistics in fp32")
    dx, columns = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, tuple(torch.zeros_like(weight) for _ in range(vectors))
    width = _width(x, weight, grad, dx)
    kind = program(type_of(x), type_of(weight), columns, width, True, mean is not None)
    loaded, rows = on.load(kind), x.numel() // columns
    adding = on.load(sums.program(type_of(weight)))
    pointers = (x.data_ptr(), grad.data_ptr(), dx.data_ptr(), weight.data_ptr(), 0)
    statistics = (_pointer(mean), rstd.data_ptr())
    if kind.source == "layernorm":
        blocks = min(rows, max(1, THREADS_BACKWARD // kind.threads) * on.processors)
        partials = rstd.new_empty(vectors, blocks, columns)
        ends = (*statistics, partials.data_ptr(), rows, columns, 0.0)
        loaded.launch("backward", blocks, kind.arguments.pack(*pointers, *ends))
    else:
        blocks, at_once = sums.spread(on, rows, columns, width, kind.threads)
        means, partials = rstd.new_empty(2, rows), rstd.new_empty(vectors, at_once, columns)
        scratch = (means.data_ptr(), partials.data_ptr())
        arguments = kind.arguments.pack(*pointers, *statistics, *scratch, rows, columns, at_once, 0.0)
        loaded.launch("means", min(rows, BLOCKS_FORWARD * on.processors), arguments)
        loaded.launch("gradients", blocks, arguments)
    found = sums.column_sums(adding, partials, weight.dtype)
    return dx, found.unbind() if vectors > 1 else (found,)
