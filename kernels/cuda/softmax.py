"""Binding of `softmax.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.columns import row_shape
from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, aligned, type_of

BLOCKS = 64
"""Most blocks on a multiprocessor."""


@cache
def program(kind: str, size: int, width: int, backward: bool) -> Program:
    """For rows of `size` scores, read by `width` at once. A thread of backward holds two numbers for each."""
    most, threads = (16, 1024) if backward else (32, 1024)
    shape = row_shape(size, width, most, threads)
    if shape is None:
        name = "causal_softmax_backward" if backward else "causal_softmax"
        raise Unavailable(f"{name} holds rows of up to {most * threads} scores, not {size}")
    definitions = (("TYPE", kind), ("BACKWARD", int(backward)), ("WIDTH", width), ("ITEMS", shape[1]))
    kernel = "backward" if backward else "forward"
    return Program("softmax", definitions, struct.Struct("@PPPqif"), (kernel,), shape[0])


def examples() -> list[Program]:
    """A sequence of 1024, and one of odd length."""
    usual = [("half", 1024, 8), ("float", 2047, 1)]
    return [program(*rows, backward) for rows in usual for backward in (False, True)]


def causal_softmax(on: KernelLauncher, scores: Tensor, scale: float) -> Tensor:
    """The weights."""
    return _launch(on, "forward", scores.contiguous(), None, scale)


def causal_softmax_backward(on: KernelLauncher, grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of the scores."""
    if grad.dtype != y.dtype:
        raise Unavailable("causal_softmax_backward needs a gradient of the dtype of the weights")
    return _launch(on, "backward", y.contiguous(), grad.contiguous(), scale)


def _launch(on: KernelLauncher, kernel: str, x: Tensor, grad: Tensor | None, scale: float) -> Tensor:
    out, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        width, operands = 16 // x.element_size(), [x, out, *([] if grad is None else [grad])]
        width = width if aligned(size, operands, width) else 1
        kind = program(type_of(x), size, width, grad is not None)
        pointers = (x.data_ptr(), 0 if grad is None else grad.data_ptr(), out.data_ptr())
        rows = x.numel() // size
        arguments = kind.arguments.pack(*pointers, rows, size, scale)
        on.load(kind).launch(kernel, min(rows, BLOCKS * on.processors), arguments)
    return out
