"""Registration of the `repro::` operators, and the few things that all kernels share.

An operator is a schema, one implementation that works on every real device, a shape function for `meta` and
`FakeTensorMode`, and the binding of its CUDA kernel.

Operators are defined with `torch.library.Library` and made differentiable by an explicit
`autograd.Function` around them rather than with `torch.library.custom_op`: a call then costs 4 microseconds
instead of 16 (14 instead of 46 when gradients are recorded), which counts because a small model on the CPU
makes thousands of calls per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.kernels.cuda.dispatch import chooser

LIBRARY = torch.library.Library("repro", "DEF")

CPU_CHUNK = 2**17
"""Elements per thread that a CPU works on at once: small enough for its caches, large against call overhead."""

DEVICE_CHUNK = 2**24
"""The same for an accelerator, where a chunk only bounds the memory of temporaries (64 MiB in fp32)."""


def operator(
    schema: str,
    implementation: Callable[..., Any],
    shape: Callable[..., Any],
    binding: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define `repro::<schema>` and return its overload (call it like the implementation).

    `binding(launcher, *arguments)` serves CUDA and `implementation` the CPU and a GPU on which the kernel is not
    to be had; `cpu` replaces it on CPU where another order of work is much faster there; `shape` returns empty
    tensors of the right shape and dtype. None of them records gradients.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    LIBRARY.impl(name, chooser(name, binding, implementation), "CUDA")
    if cpu is not None:
        LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"repro::{name}", shape, lib=LIBRARY)
    return getattr(torch.ops.repro, name).default


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything, except fp64 for fp64 (gradient checks)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of rows that together hold about one chunk of elements; at least one row each."""
    elements = CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    step = max(1, elements // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of a [R, C] matrix over its rows, accumulated in fp32 at least, as `dtype` [C]."""
    return rows.sum(0).to(dtype)


class Operand(NamedTuple):
    """What a cost formula needs to know about a tensor."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Cost(NamedTuple):
    """What one call must do, whoever does it: operands are read once and results are written once."""

    flops: int
    """Floating-point operations; add, multiply, compare, divide, sqrt, exp and sigmoid count one each."""
    bytes_read: int
    bytes_written: int
