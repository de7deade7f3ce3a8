"""Binding of `norm.cu`."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import Launcher, Loaded, Program, type_of

TENSORS = 160
"""Tensors in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384
BLOCKS = 8
"""Blocks on a multiprocessor that fill it."""


@cache
def program(kind: str) -> Program:
    """For tensors of this type."""
    layout = struct.Struct(f"@{TENSORS}P{TENSORS}q{TENSORS}iiiPP0q")
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
        rest = [0] * (TENSORS - len(pointers))
        ends = (len(pointers), 0, place, result.data_ptr())
        loaded[kind].launch(
            "partial", blocks, kind.arguments.pack(*pointers, *rest, *counts, *rest, *chunks, *rest, *ends)
        )
        place += 8 * blocks
    kind, kernel = next(iter(loaded.items()))
    _total(kernel, kind, partials, result)
    return result


def _total(kernel: Loaded, kind: Program, partials: Tensor, result: Tensor) -> None:
    none = [0] * (3 * TENSORS)
    ends = (0, partials.numel(), partials.data_ptr(), result.data_ptr())
    kernel.launch("total", 1, kind.arguments.pack(*none, *ends))
