"""Registration of the `repro::` operators, and helpers that all kernels share.

An operator consists of a schema, an implementation for all real devices, a shape function for `meta`, and the binding
of its CUDA kernel. `torch.library.Library` with an explicit `autograd.Function` costs a quarter of the time of
`torch.library.custom_op` per call, which matters for small models on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.kernels.cuda.device import cuda_dispatcher

LIBRARY = torch.library.Library("repro", "DEF")

CPU_CHUNK = 2**17
"""Elements per thread that a CPU processes at once, a compromise between caches and call overhead."""

DEVICE_CHUNK = 2**24
"""Elements that an accelerator processes at once, a limit on the memory of temporaries (64 MiB in fp32)."""


def operator(
    schema: str,
    implementation: Callable[..., Any],
    shape: Callable[..., Any],
    binding: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define `repro::<schema>` and return its overload (call it like the implementation).

    `binding(launcher, *arguments)` runs on CUDA, and `implementation` on the CPU and on a GPU without the kernel. `cpu`
    replaces the implementation on the CPU. `shape` returns empty results. None of them records gradients.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    LIBRARY.impl(name, cuda_dispatcher(name, binding, implementation), "CUDA")
    if cpu is not None:
        LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"repro::{name}", shape, lib=LIBRARY)
    return getattr(torch.ops.repro, name).default


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 (gradient checks), and fp32 for all other types."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Return ranges [first, last) of rows with about one chunk of elements, and one row at least."""
    elements = CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    step = max(1, elements // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def flatten_rows(x: Tensor) -> Tensor:
    """Return x [..., C] as a contiguous matrix [R, C]."""
    return x.contiguous().view(-1, x.shape[-1])


class Operand(NamedTuple):
    """Shape and element size of a tensor, the input of cost formulas."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Cost(NamedTuple):
    """Necessary work of one call: operands are read once and results are written once."""

    flops: int
    """Floating-point operations; add, multiply, compare, divide, sqrt, exp and sigmoid count one each."""
    bytes_read: int
    bytes_written: int
