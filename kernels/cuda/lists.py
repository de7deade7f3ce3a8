"""Many tensors in one launch: as many of one program as its arguments have room for, cut into chunks for its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from repro.kernels.cuda.program import KernelLauncher, Loaded, Program

BLOCKS = 8
"""Blocks on a multiprocessor that fill it."""


Part = tuple[Loaded, list[tuple[int, ...]], list[int], int]
"""What one launch does: program, tensors, chunks of each of them and all before it, blocks."""


def parts(
    on: KernelLauncher, tensors: Iterable[tuple[Program, tuple[int, ...]]], room: int, chunk: int
) -> list[Part]:
    """Launches of at most `room` tensors of one program each.

    tensors: for each its program, and its pointers followed by its number of elements; without elements it is in no
    launch. chunk: elements that a block takes at once. Raises Unavailable, before anything is launched.
    """
    groups: dict[Program, list[tuple[int, ...]]] = {}
    for program, tensor in tensors:
        if tensor[-1]:
            groups.setdefault(program, []).append(tensor)
    found = []
    for program, members in groups.items():
        loaded = on.load(program)
        for start in range(0, len(members), room):
            part = members[start : start + room]
            chunks: list[int] = []
            total = 0
            for tensor in part:
                total -= -tensor[-1] // chunk
                chunks.append(total)
            found.append((loaded, part, chunks, min(total, BLOCKS * on.processors)))
    return found
