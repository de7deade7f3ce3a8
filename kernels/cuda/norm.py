"""Binding of `norm.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import Launcher, Program, packed, type_of

TENSORS = 160
"""Tensors in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384
BLOCKS = 8
"""Blocks on a multiprocessor that fill it."""
ENDS = struct.Struct("@iiPP0q")
"""What follows the arrays in the arguments."""
NONE = bytes(20 * TENSORS)
"""The arrays of no tensors."""


@cache
def program(kind: str) -> Program:
    """For tensors of this type."""
    layout = struct.Struct(f"@{TENSORS}P{TENSORS}q{TENSORS}i" + ENDS.format[1:])
    definitions = (("TYPE", kind), ("TENSORS", TENSORS), ("CHUNK", CHUNK))
    return Program("norm", definitions, layout, ("partial", "total"), 256)


def examples() -> list[Program]:
    """Of fp32 and of 16-bit gradients."""
    return [program("float"), program("bfloat16")]


def norm_squared(on: Launcher, tensors: list[Tensor]) -> Tensor:
    """One launch for every 160 tensors of a type, and one that adds up; every block leaves one number."""
    groups: dict[Program, list[Tensor]] = {}
    for tensor in tensors:
        kind = program(type_of(tensor))
        if tensor.numel():
            groups.setdefault(kind, []).append(tensor.contiguous())
    result = torch.empty((), dtype=torch.float32, device=tensors[0].device)
    if not groups:
        return result.zero_()
    loaded = {kind: on.load(kind) for kind in groups}
    launches: list[tuple[Program, list[int], int, list[int], list[int]]] = []
    for kind, members in groups.items():
        for start in range(0, len(members), TENSORS):
            part = members[start : start + TENSORS]
            counts = [t.numel() for t in part]
            chunks: list[int] = []
            for count in counts:
                chunks.append((chunks[-1] if chunks else 0) - (-count // CHUNK))
            blocks = min(chunks[-1], BLOCKS * on.processors)
            launches.append((kind, [t.data_ptr() for t in part], blocks, counts, chunks))
    total = sum(blocks for _, _, blocks, _, _ in launches)
    partials = torch.empty(total, dtype=torch.float64, device=result.device)
    place = partials.data_ptr()
    for kind, pointers, blocks, counts, chunks in launches:
        arrays = packed("Q", pointers, TENSORS) + packed("q", counts, TENSORS) + packed("i", chunks, TENSORS)
        ends = ENDS.pack(len(pointers), 0, place, result.data_ptr())
        loaded[kind].launch("partial", blocks, arrays + ends)
        place += 8 * blocks
    ends = ENDS.pack(0, total, partials.data_ptr(), result.data_ptr())
    next(iter(loaded.values())).launch("total", 1, NONE + ends)
    return result
