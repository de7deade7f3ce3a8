"""Programs (CUDA sources with definitions), the interface of devices, and launches over lists of tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parent.parent
"""Folder of the .cu files; their shared headers are in `cuda/`."""

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
"""Data type of kernels -> name in the sources (`cuda/number.cuh`)."""
TYPE_BYTES = {name: dtype.itemsize for dtype, name in TYPES.items()}
"""Bytes of an element, by its type in the sources."""


class Unavailable(RuntimeError):
    """Error: a kernel cannot be compiled, loaded or applied to these tensors. The message gives reason and remedy."""


@dataclass(frozen=True, eq=False)
class Program:
    """One source with its definitions. Every kernel in it takes one struct `Arguments` by value."""

    source: str
    """Name of the .cu file without its ending."""
    definitions: tuple[tuple[str, str | int], ...]
    """Macros of the source: types, and sizes that must be constants."""
    arguments: struct.Struct
    """`Arguments` as Python packs it (native order and alignment); the compiler checks its size."""
    kernels: tuple[str, ...]
    threads: int
    """Threads per block, defined as THREADS in the source."""

    @property
    def name(self) -> str:
        """Source and definitions as text for messages."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.definitions)])

    @cached_property
    def text(self) -> str:
        """Full source, with its definitions first."""
        sizes = [("THREADS", self.threads), ("ARGUMENTS_BYTES", self.arguments.size)]
        lines = [f"#define {name} {value}" for name, value in [*self.definitions, *sizes]]
        return "\n".join([*lines, f'#line 1 "{self.source}.cu"', (SOURCES / f"{self.source}.cu").read_text()])


class Loaded(Protocol):
    """Interface of a program on a device."""

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        """Queue `blocks` blocks of the program's threads, in the order of torch's current stream."""
        ...


class KernelLauncher(Protocol):
    """Interface of a device. A binding loads all its programs before a launch, so that a failure changes no tensor."""

    processors: int
    """Number of multiprocessors."""

    def load(self, program: Program) -> Loaded:
        """Load a program.  Raises Unavailable."""
        ...


@cache
def headers() -> dict[str, str]:
    """Return the text of the shared headers by their name in `#include`."""
    return {path.name: path.read_text() for path in sorted((SOURCES / "cuda").glob("*.cuh"))}


def source_type(tensor: Tensor) -> str:
    """Return the tensor's type in the sources. Raises Unavailable for an unsupported type."""
    name = TYPES.get(tensor.dtype)
    if name is None:
        raise Unavailable(f"kernels compute on fp32, fp16 and bf16, not on {tensor.dtype}")
    return name


def is_aligned(columns: int, tensors: Sequence[Tensor], width: int) -> bool:
    """Return whether all accesses to `width` elements are aligned in rows of `columns`."""
    if columns % width:
        return False
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    if not places & 15:
        return True
    return all(t.data_ptr() % min(16, width * t.element_size()) == 0 for t in tensors)


def read_width(columns: int, tensors: Sequence[Tensor]) -> int:
    """Return the elements that a thread reads at once: 16 bytes of the first tensor, or one element if unaligned."""
    width = 16 // tensors[0].element_size()
    return width if is_aligned(columns, tensors, width) else 1


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor's data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


BLOCKS_PER_PROCESSOR = 8
"""Blocks that fill a multiprocessor."""


PackedLaunch = tuple[Loaded, list[tuple[int, ...]], list[int], int]
"""One launch: program, tensors, cumulative number of chunks by tensor, and blocks."""


def pack_launches(
    on: KernelLauncher, tensors: Iterable[tuple[Program, tuple[int, ...]]], max_tensors: int, chunk: int
) -> list[PackedLaunch]:
    """Return launches of at most `max_tensors` tensors, each of one program.

    tensors: program of each tensor, and its pointers and number of elements; empty tensors have no launch. chunk:
    elements that a block processes at once. Raises Unavailable before the first launch.
    """
    groups: dict[Program, list[tuple[int, ...]]] = {}
    for program, tensor in tensors:
        if tensor[-1]:
            groups.setdefault(program, []).append(tensor)
    found = []
    for program, members in groups.items():
        loaded = on.load(program)
        for start in range(0, len(members), max_tensors):
            part = members[start : start + max_tensors]
            chunks: list[int] = []
            total = 0
            for tensor in part:
                total -= -tensor[-1] // chunk
                chunks.append(total)
            found.append((loaded, part, chunks, min(total, BLOCKS_PER_PROCESSOR * on.processors)))
    return found
