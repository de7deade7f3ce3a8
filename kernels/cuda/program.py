"""CUDA programs (a source with macro definitions), the interface of devices, and kernel launches over many tensors."""

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
"""Folder of the .cu files, whose shared headers are in `cuda/`."""

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
"""Name in the CUDA sources (`cuda/number.cuh`) of each supported dtype."""
TYPE_BYTES = {name: dtype.itemsize for dtype, name in TYPES.items()}
"""Bytes of a tensor element, by the name of the element's type in the CUDA sources."""


class Unavailable(RuntimeError):
    """Error: a CUDA kernel cannot be compiled, loaded or applied to its arguments. The message gives the reason."""


@dataclass(frozen=True, eq=False)
class Program:
    """A CUDA source with macro definitions. Each of its kernels takes one struct `Arguments` by value."""

    source: str
    """Name of the .cu file without its extension."""
    definitions: tuple[tuple[str, str | int], ...]
    """Names and values of the source's macros: types, and sizes that must be constants at compile time."""
    arguments: struct.Struct
    """Format of the source's struct `Arguments`, in native byte order and alignment."""
    kernels: tuple[str, ...]
    """Names of the CUDA kernels in the source."""
    threads: int
    """Threads per thread block, the macro THREADS in the source."""

    @property
    def name(self) -> str:
        """Return the name of the CUDA source with all macro definitions, for messages."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.definitions)])

    @cached_property
    def text(self) -> str:
        """Return the text of the CUDA program: its macro definitions, followed by the source."""
        sizes = [("THREADS", self.threads), ("ARGUMENTS_BYTES", self.arguments.size)]
        lines = [f"#define {name} {value}" for name, value in [*self.definitions, *sizes]]
        return "\n".join([*lines, f'#line 1 "{self.source}.cu"', (SOURCES / f"{self.source}.cu").read_text()])


class Loaded(Protocol):
    """Interface of a CUDA program that is loaded on a device."""

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        """Queue the kernel with the name `kernel` with `blocks` thread blocks on torch's current stream."""
        ...


class KernelLauncher(Protocol):
    """Interface of a device that runs CUDA programs. An operator loads all its programs before its first launch."""

    processors: int
    """Number of multiprocessors of the device."""

    def load(self, program: Program) -> Loaded:
        """Return the CUDA program, loaded on the device at the first call. Raises `Unavailable` if that fails."""
        ...


@cache
def headers() -> dict[str, str]:
    """Return the texts of the shared CUDA headers, by their names in `#include`."""
    return {path.name: path.read_text() for path in sorted((SOURCES / "cuda").glob("*.cuh"))}


def source_type(tensor: Tensor) -> str:
    """Return the name that a tensor's dtype has in the CUDA sources. Raises `Unavailable` for an unsupported dtype."""
    name = TYPES.get(tensor.dtype)
    if name is None:
        raise Unavailable(f"CUDA kernels support fp32, fp16 and bf16, not {tensor.dtype}")
    return name


def is_aligned(columns: int, tensors: Sequence[Tensor], width: int) -> bool:
    """Return whether reads of `width` elements are aligned in all `tensors`, whose rows have `columns` elements."""
    if columns % width:
        return False
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    if not places & 15:
        return True
    return all(t.data_ptr() % min(16, width * t.element_size()) == 0 for t in tensors)


def read_width(columns: int, tensors: Sequence[Tensor]) -> int:
    """Return how many elements a thread reads at once: 16 bytes of the first tensor, or one element if unaligned."""
    width = 16 // tensors[0].element_size()
    return width if is_aligned(columns, tensors, width) else 1


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor's data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


BLOCKS_PER_PROCESSOR = 8
"""Maximum number of thread blocks per multiprocessor in a launch over several tensors."""


PackedLaunch = tuple[Loaded, list[tuple[int, ...]], list[int], int]
"""Kernel launch for several tensors: program, pointers and size of each, prefix sums of their chunks, thread blocks."""


def pack_launches(
    on: KernelLauncher, tensors: Iterable[tuple[Program, tuple[int, ...]]], max_tensors: int, chunk: int
) -> list[PackedLaunch]:
    """Return kernel launches of at most `max_tensors` tensors each, which cover all `tensors` that are not empty.

    `tensors`: program of each tensor, and its pointers and number of elements. `chunk`: number of elements that a
    thread block processes at once. Raises `Unavailable` if a program cannot be loaded.
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
