"""Binding of `glu.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, Unavailable, aligned, type_of

BLOCKS = 16
"""Most blocks on a multiprocessor: two rounds of what fits."""


@cache
def program(kind: str, width: int) -> Program:
    """For rows that are read by `width` elements at once."""
    definitions = (("TYPE", kind), ("WIDTH", width))
    return Program("glu", definitions, struct.Struct("@PPPqi0q"), ("forward", "backward"), 256)


def examples() -> list[Program]:
    """In 16 bits, and rows of odd length."""
    return [program("bfloat16", 8), program("half", 1)]


def _launch(on: KernelLauncher, kernel: str, x: Tensor, grad: Tensor | None, into: Tensor) -> Tensor:
    if x.numel():
        columns, width = x.shape[-1] // 2, 16 // x.element_size()
        tensors = [x, into] if grad is None else [x, into, grad]
        width = width if aligned(columns, tensors, width) else 1
        kind, rows = program(type_of(x), width), x.numel() // x.shape[-1]
        blocks = min(-(-rows * columns // width // kind.threads), BLOCKS * on.processors)
        pointers = (x.data_ptr(), 0 if grad is None else grad.data_ptr(), into.data_ptr())
        on.load(kind).launch(kernel, blocks, kind.arguments.pack(*pointers, rows, columns))
    return into


def swiglu(on: KernelLauncher, x: Tensor) -> Tensor:
    """y."""
    x = x.contiguous()
    return _launch(on, "forward", x, None, x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))


def swiglu_backward(on: KernelLauncher, grad: Tensor, x: Tensor) -> Tensor:
    """dx."""
    if grad.dtype != x.dtype:
        raise Unavailable("swiglu_backward needs a gradient of the dtype of x")
    x = x.contiguous()
    return _launch(on, "backward", x, grad.contiguous(), torch.empty_like(x))
