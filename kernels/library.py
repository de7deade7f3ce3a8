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
from torch.autograd.function import once_differentiable

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


def no_result(*_: object) -> None:
    """Return the shape of the result of an operator that changes its arguments only."""
    return


def like_first(x: Tensor, *_: object) -> Tensor:
    """Return an empty result with the shape and the dtype of the first argument."""
    return x.new_empty(x.shape)


class Differentiable(torch.autograd.Function):
    """Operator whose gradients are the results of another operator, `backward(grad, *saved)`.

    Both are functions of the operator's module, so that a trace shows a line of that module.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        saved: tuple[int, ...],
        *inputs: Tensor,
    ) -> Tensor:
        """Return the first result of `forward(*inputs)`; `saved`: numbers of saved inputs and, after them, results."""
        results = _as_tuple(forward(*inputs))
        ctx.save_for_backward(*((*inputs, *results)[number] for number in saved))
        ctx.gradients = backward
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_as_tuple(ctx.gradients(grad, *ctx.saved_tensors))


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


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
