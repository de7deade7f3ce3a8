"""Binding of `packing.cu`."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache

from torch import Tensor

from repro.kernels.cuda.program import Launcher, Program, Unavailable, type_of

COPIES = 128
"""Copies in one launch: their pointers travel as arguments, of which there may be 4096 bytes."""
CHUNK = 16384
BLOCKS = 8
"""Blocks on a multiprocessor that fill it."""


@cache
def program(source: str, target: str) -> Program:
    """From one type to another."""
    layout = struct.Struct(f"@{COPIES}P{COPIES}P{COPIES}q{COPIES}iif0q")
    definitions = (("SOURCE", source), ("TARGET", target), ("COPIES", COPIES), ("CHUNK", CHUNK))
    return Program("packing", definitions, layout, ("copies",), 256)


def examples() -> list[Program]:
    """16-bit gradients into an fp32 bucket, and copies without conversion."""
    return [program("half", "float"), program("bfloat16", "bfloat16")]


def pack(on: Launcher, tensors: list[Tensor], flat: Tensor, scale: float) -> None:
    """One launch for every 128 tensors of a type."""
    _copy(on, ((t.contiguous(), part) for t, part in _parts(flat, tensors)), scale)


def unpack(on: Launcher, flat: Tensor, tensors: list[Tensor], scale: float) -> None:
    """One launch for every 128 tensors of a type."""
    if not all(t.is_contiguous() for t in tensors):
        raise Unavailable("unpack needs contiguous tensors")
    _copy(on, ((part, t) for t, part in _parts(flat, tensors)), scale)


def _parts(flat: Tensor, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if not flat.is_contiguous():
        raise Unavailable("pack and unpack need a contiguous buffer")
    return list(
        zip(
            tensors,
            flat.split([*(t.numel() for t in tensors), flat.numel() - sum(t.numel() for t in tensors)]),
            strict=False,
        )
    )


def _copy(on: Launcher, pairs: Iterable[tuple[Tensor, Tensor]], scale: float) -> None:
    groups: dict[Program, list[tuple[Tensor, Tensor]]] = {}
    for source, target in pairs:
        kind = program(type_of(source), type_of(target))
        if source.numel():
            groups.setdefault(kind, []).append((source, target))
    for kind in groups:
        on.load(kind)
    for kind, members in groups.items():
        for start in range(0, len(members), COPIES):
            part = members[start : start + COPIES]
            rest = [0] * (COPIES - len(part))
            counts = [source.numel() for source, _ in part]
            chunks: list[int] = []
            for count in counts:
                chunks.append((chunks[-1] if chunks else 0) - (-count // CHUNK))
            sources = [source.data_ptr() for source, _ in part]
            targets = [target.data_ptr() for _, target in part]
            arguments = kind.arguments.pack(
                *sources, *rest, *targets, *rest, *counts, *rest, *chunks, *rest, len(part), scale
            )
            on.load(kind).launch("copies", min(chunks[-1], BLOCKS * on.processors), arguments)
