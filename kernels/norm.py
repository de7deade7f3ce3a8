"""Sum of squares of many tensors: a rank's part of the global gradient norm, which also detects overflows."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, pack_launches, source_type
from repro.kernels.library import Cost, Operand, operator

MAX_TENSORS = 160
"""Maximum number of tensors per kernel launch, because the arguments of a CUDA kernel are limited to 4096 bytes."""
BLOCK_ELEMENTS = 16384
"""Number of elements of a tensor that a thread block of the norm kernel processes at once."""


@cache
def norm_arguments(count: int) -> struct.Struct:
    """Return the `struct` format of the norm kernel's arguments for `count` tensors, padded to the maximum number."""
    rest = MAX_TENSORS - count
    return struct.Struct(f"@{count}P{8 * rest}x{count}q{8 * rest}x{count}i{4 * rest}xiiPP0q")


@cache
def program(kind: str) -> Program:
    """Return the CUDA program of the squared norm for tensors of type `kind`, a type name of the CUDA sources."""
    definitions = (("TYPE", kind), ("TENSORS", MAX_TENSORS), ("CHUNK", BLOCK_ELEMENTS))
    return Program("norm", definitions, norm_arguments(MAX_TENSORS), ("partial", "total"), 256)


def examples() -> list[Program]:
    """Return example CUDA programs of the squared norm, for fp32 and for bf16 gradients."""
    return [program("float"), program("bfloat16")]


def launch_norm_squared(on: KernelLauncher, tensors: list[Tensor]) -> Tensor:
    """Launch the norm kernel once per 160 tensors of a dtype, and then a kernel that adds the blocks' partial sums."""
    tensors = [tensor.contiguous() for tensor in tensors]
    sources = [(program(source_type(t)), (t.data_ptr(), t.numel())) for t in tensors]
    launches = pack_launches(on, sources, MAX_TENSORS, BLOCK_ELEMENTS)
    result = tensors[0].new_empty((), dtype=torch.float32)
    if not launches:
        return result.zero_()
    total = sum([blocks for _, _, _, blocks in launches])
    partials = torch.empty(total, dtype=torch.float64, device=result.device)
    place = partials.data_ptr()
    for loaded, part, chunks, blocks in launches:
        pointers, counts = zip(*part, strict=True)
        arrays = (*pointers, *counts, *chunks)
        arguments = norm_arguments(len(part)).pack(*arrays, len(part), 0, place, result.data_ptr())
        loaded.launch("partial", blocks, arguments)
        place += 8 * blocks
    arguments = norm_arguments(0).pack(0, total, partials.data_ptr(), result.data_ptr())
    launches[0][0].launch("total", 1, arguments)
    return result


CPU_CHUNK_ELEMENTS = 2**18
"""Number of elements whose norm a CPU computes at once, which limits the fp32 copy of 16-bit tensors to 1 MiB."""

CPU_ROW_ELEMENTS = 2**10
"""Number of elements per norm on a CPU, because torch's norm of 4e6 equal numbers at once is wrong by 0.2 %."""


def reference(tensors: list[Tensor]) -> Tensor:
    """Compute the sum of squares with plain torch operators in the dtype of the arguments."""
    return torch.stack([t.square().sum() for t in tensors]).sum()


@torch.no_grad()
def _norm_squared(tensors: list[Tensor]) -> Tensor:
    # A foreach norm accumulates 16-bit tensors in fp32, in one kernel and without temporary copies.
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square_().sum()


@torch.no_grad()
def _norm_squared_cpu(tensors: list[Tensor]) -> Tensor:
    norms = []
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(CPU_CHUNK_ELEMENTS):
            wide = piece.float()
            in_rows = wide.numel() // CPU_ROW_ELEMENTS * CPU_ROW_ELEMENTS
            if in_rows:
                norms.append(torch.linalg.vector_norm(wide[:in_rows].view(-1, CPU_ROW_ELEMENTS), dim=1))
            if in_rows < wide.numel() or not in_rows:
                norms.append(torch.linalg.vector_norm(wide[in_rows:]).view(1))
    return torch.cat(norms).square_().sum()


def _shape(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


norm_operator = operator(
    "norm_squared(Tensor[] tensors) -> Tensor", _norm_squared, _shape, launch_norm_squared, _norm_squared_cpu
)


def norm_squared(tensors: list[Tensor], *, plain: bool = False) -> Tensor:
    """Return the sum of the squares of all elements of all tensors, a 0-dim fp32 tensor.

    The tensors may have any floating dtype and any shape. The result is inf or nan if any element is inf or nan, or if
    an element exceeds 1.8e19, whose square overflows. `plain`: use torch's operators on every device. Raises ValueError
    for an empty list.
    """
    if not tensors:
        raise ValueError(
            "norm_squared needs at least one tensor, because an empty list has no device for the result"
        )
    if plain:
        return (_norm_squared_cpu if tensors[0].device.type == "cpu" else _norm_squared)(tensors)
    return norm_operator(tensors)


def cost(tensors: list[Operand]) -> Cost:
    """Return the cost of the squared norm: 2 FLOP per element, square and add."""
    return Cost(2 * sum(t.numel for t in tensors), sum(t.nbytes for t in tensors), 4)
