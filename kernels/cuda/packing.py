"""Binding of `packing.cu`."""

from __future__ import annotations

import struct
from functools import cache

from torch import Tensor

from repro.kernels.cuda.lists import parts
from repro.kernels.cuda.program import Launcher, Program, Unavailable, type_of

COPIES = 128
"""Copies in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384


@cache
def layout(count: int) -> struct.Struct:
    """The arguments with so many copies, and zeros where there is room for more."""
    rest = COPIES - count
    pointers = f"{count}P{8 * rest}x"
    return struct.Struct(f"@{pointers}{pointers}{count}q{8 * rest}x{count}i{4 * rest}xif0q")


@cache
def program(source: str, target: str) -> Program:
    """From one type to another."""
    definitions = (("SOURCE", source), ("TARGET", target), ("COPIES", COPIES), ("CHUNK", CHUNK))
    return Program("packing", definitions, layout(COPIES), ("copies",), 256)


def examples() -> list[Program]:
    """16-bit gradients into an fp32 bucket, and copies without conversion."""
    return [program("half", "float"), program("bfloat16", "bfloat16")]


def pack(on: Launcher, tensors: list[Tensor], flat: Tensor, scale: float) -> None:
    """One launch for every 128 tensors of a type."""
    _copy(on, [t.contiguous() for t in tensors], flat, scale, into_flat=True)


def unpack(on: Launcher, flat: Tensor, tensors: list[Tensor], scale: float) -> None:
    """One launch for every 128 tensors of a type."""
    if not all(t.is_contiguous() for t in tensors):
        raise Unavailable("unpack needs contiguous tensors")
    _copy(on, tensors, flat, scale, into_flat=False)


def _copy(on: Launcher, tensors: list[Tensor], flat: Tensor, scale: float, *, into_flat: bool) -> None:
    if not flat.is_contiguous():
        raise Unavailable("pack and unpack need a contiguous buffer")
    whole, place, size = type_of(flat), flat.data_ptr(), flat.element_size()
    copies = []
    for tensor in tensors:
        kind = program(type_of(tensor), whole) if into_flat else program(whole, type_of(tensor))
        ends = (tensor.data_ptr(), place) if into_flat else (place, tensor.data_ptr())
        count = tensor.numel()
        copies.append((kind, (*ends, count)))
        place += count * size
    for loaded, part, chunks, blocks in parts(on, copies, COPIES, CHUNK):
        sources, targets, counts = zip(*part, strict=True)
        arguments = layout(len(part)).pack(*sources, *targets, *counts, *chunks, len(part), scale)
        loaded.launch("copies", blocks, arguments)
