"""Binding of `packing.cu`."""

from __future__ import annotations

import struct
from functools import cache

from torch import Tensor

from repro.kernels.cuda.program import Launcher, Program, Unavailable, packed, type_of

COPIES = 128
"""Copies in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384
BLOCKS = 8
"""Blocks on a multiprocessor that fill it."""
ENDS = struct.Struct("@if0q")
"""What follows the arrays in the arguments."""


@cache
def program(source: str, target: str) -> Program:
    """From one type to another."""
    layout = struct.Struct(f"@{COPIES}P{COPIES}P{COPIES}q{COPIES}i" + ENDS.format[1:])
    definitions = (("SOURCE", source), ("TARGET", target), ("COPIES", COPIES), ("CHUNK", CHUNK))
    return Program("packing", definitions, layout, ("copies",), 256)


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
    groups: dict[Program, list[tuple[int, int, int]]] = {}
    for tensor in tensors:
        kind = program(type_of(tensor), whole) if into_flat else program(whole, type_of(tensor))
        count = tensor.numel()
        if count:
            ends = (tensor.data_ptr(), place) if into_flat else (place, tensor.data_ptr())
            groups.setdefault(kind, []).append((*ends, count))
            place += count * size
    loaded = [(on.load(kind), members) for kind, members in groups.items()]
    for kernel, members in loaded:
        for start in range(0, len(members), COPIES):
            sources, targets, counts = map(list, zip(*members[start : start + COPIES], strict=True))
            chunks: list[int] = []
            for count in counts:
                chunks.append((chunks[-1] if chunks else 0) - (-count // CHUNK))
            arguments = (
                packed("Q", sources, COPIES) + packed("Q", targets, COPIES) + packed("q", counts, COPIES)
            )
            arguments += packed("i", chunks, COPIES) + ENDS.pack(len(counts), scale)
            kernel.launch("copies", min(chunks[-1], BLOCKS * on.processors), arguments)
