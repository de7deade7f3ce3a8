"""Registration of the `repro::` operators with torch, and helpers that all kernels share.

`torch.library.Library` with an explicit `autograd.Function` takes a quarter of the call time of
`torch.library.custom_op`, which matters for small models on a CPU.
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
"""Elements that an operator processes at once per CPU thread: more exceed the caches, fewer cost call overhead."""

DEVICE_CHUNK = 2**24
"""Number of elements that torch's operators process at once on a GPU, which limits fp32 temporaries to 64 MiB."""


def operator(
    schema: str,
    implementation: Callable[..., Any],
    shape: Callable[..., Any],
    binding: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Register the operator `repro::<schema>` with torch and return it; it takes the arguments of `implementation`.

    `binding(launcher, *arguments)` runs the CUDA kernel. `implementation` runs on CPUs, unless `cpu` replaces it, and
    on GPUs without the kernel. `shape` returns empty results for `meta` tensors. No function records gradients.
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
    """Return None: shape function, for `meta` tensors, of an operator that only modifies its arguments."""
    return


def like_first(x: Tensor, *_: object) -> Tensor:
    """Return an empty tensor like `x`: shape function, for `meta` tensors, of operators whose result is like `x`."""
    return x.new_empty(x.shape)


class Differentiable(torch.autograd.Function):
    """Autograd function of a forward operator, and of a backward operator that computes the gradients of all inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        saved: tuple[int, ...],
        *inputs: Tensor,
    ) -> Tensor:
        """Return the first result of `forward(*inputs)`. `saved`: indices of inputs and results saved for backward."""
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
    """Return the dtype in which an operator on `dtype` accumulates: fp64 for fp64, and fp32 for all other dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of rows processed at once: at most one chunk of elements, or a single row."""
    elements = CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    step = max(1, elements // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def flatten_rows(x: Tensor) -> Tensor:
    """Return x [..., C] as a contiguous matrix [R, C]."""
    return x.contiguous().view(-1, x.shape[-1])


class Operand(NamedTuple):
    """Shape and element size of a tensor, as input of the cost formulas of operators."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Cost(NamedTuple):
    """Necessary work of one call of an operator, if it reads operands once and writes results once."""

    flops: int
    """Number of floating-point operations; an addition, product, comparison, quotient, sqrt, exp or sigmoid is one."""
    bytes_read: int
    bytes_written: int
