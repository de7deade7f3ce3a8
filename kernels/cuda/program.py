"""What is compiled and launched: a source with its definitions, and who can launch it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parent.parent
"""Where the .cu files are; the headers that they share are in `cuda/`."""

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
"""What kernels compute on, and its name in the sources (`cuda/number.cuh`)."""


class Unavailable(RuntimeError):
    """A kernel cannot be compiled, loaded or applied to these tensors; the message says why and what to do."""


@dataclass(frozen=True, eq=False)
class Program:
    """One source with its definitions. Every kernel in it takes one struct `Arguments` by value."""

    source: str
    """Name of the .cu file without its ending."""
    definitions: tuple[tuple[str, str | int], ...]
    """Names that the source leaves open: types, sizes that must be constants."""
    arguments: struct.Struct
    """`Arguments` as Python packs it (native order and alignment); the compiler checks its size."""
    kernels: tuple[str, ...]
    threads: int
    """Threads of a block, known to the compiler as THREADS."""

    @property
    def name(self) -> str:
        """Source and what it was specialised for, for people."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.definitions)])

    @cached_property
    def text(self) -> str:
        """The whole source, its definitions first."""
        sizes = [("THREADS", self.threads), ("ARGUMENTS_BYTES", self.arguments.size)]
        lines = [f"#define {name} {value}" for name, value in [*self.definitions, *sizes]]
        return "\n".join([*lines, f'#line 1 "{self.source}.cu"', (SOURCES / f"{self.source}.cu").read_text()])


class Loaded(Protocol):
    """A program on a device."""

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        """Queue `blocks` blocks of the program's threads, in the order of torch's current stream."""
        ...


class KernelLauncher(Protocol):
    """A device. A binding loads all its programs before it launches any, so that a failure changes nothing."""

    processors: int
    """Multiprocessors: how many blocks it takes to fill the device is a small multiple of it."""

    def load(self, program: Program) -> Loaded:
        """Raises Unavailable."""
        ...


@cache
def headers() -> dict[str, str]:
    """Name in `#include` -> text of the headers that the sources share."""
    return {path.name: path.read_text() for path in sorted((SOURCES / "cuda").glob("*.cuh"))}


def type_of(tensor: Tensor) -> str:
    """The tensor's type in the sources. Raises Unavailable for one that kernels do not compute on."""
    name = TYPES.get(tensor.dtype)
    if name is None:
        raise Unavailable(f"kernels compute on fp32, fp16 and bf16, not on {tensor.dtype}")
    return name


def aligned(columns: int, tensors: Sequence[Tensor], width: int) -> bool:
    """Whether `width` elements from any multiple of `width` on are one aligned access in rows of `columns`."""
    if columns % width:
        return False
    places = 0
    for tensor in tensors:
        places |= tensor.data_ptr()
    if not places & 15:
        return True
    return all(t.data_ptr() % min(16, width * t.element_size()) == 0 for t in tensors)
