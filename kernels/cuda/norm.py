"""Binding of `norm.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.lists import parts
from repro.kernels.cuda.program import KernelLauncher, Program, type_of

TENSORS = 160
"""Tensors in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384


@cache
def layout(count: int) -> struct.Struct:
    """The arguments with so many tensors, and zeros where there is room for more."""
    rest = TENSORS - count
    return struct.Struct(f"@{count}P{8 * rest}x{count}q{8 * rest}x{count}i{4 * rest}xiiPP0q")


@cache
def program(kind: str) -> Program:
    """For tensors of this type."""
    definitions = (("TYPE", kind), ("TENSORS", TENSORS), ("CHUNK", CHUNK))
    return Program("norm", definitions, layout(TENSORS), ("partial", "total"), 256)


def examples() -> list[Program]:
    """Of fp32 and of 16-bit gradients."""
    return [program("float"), program("bfloat16")]


def norm_squared(on: KernelLauncher, tensors: list[Tensor]) -> Tensor:
    """One launch for every 160 tensors of a type, and one that adds up; every block leaves one number."""
    tensors = [tensor.contiguous() for tensor in tensors]
    sources = [(program(type_of(t)), (t.data_ptr(), t.numel())) for t in tensors]
    launches = parts(on, sources, TENSORS, CHUNK)
    result = tensors[0].new_empty((), dtype=torch.float32)
    if not launches:
        return result.zero_()
    total = sum([blocks for _, _, _, blocks in launches])
    partials = torch.empty(total, dtype=torch.float64, device=result.device)
    place = partials.data_ptr()
    for loaded, part, chunks, blocks in launches:
        pointers, counts = zip(*part, strict=True)
        arrays = (*pointers, *counts, *chunks)
        arguments = layout(len(part)).pack(*arrays, len(part), 0, place, result.data_ptr())
        loaded.launch("partial", blocks, arguments)
        place += 8 * blocks
    arguments = layout(0).pack(0, total, partials.data_ptr(), result.data_ptr())
    launches[0][0].launch("total", 1, arguments)
    return result
