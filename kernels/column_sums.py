"""Column sums of a matrix, for gradients of biases and norm weights, and the distribution of rows over threads."""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Loaded, Program, read_width, source_type
from repro.kernels.library import Cost, Operand, flatten_rows, operator

ARGUMENTS = struct.Struct("@PPPPiii0q")
SUM_THREADS_PER_PROCESSOR = 1024
"""Threads per multiprocessor of the column-sum kernel. Fewer leave bandwidth unused; more need more partial sums."""


@cache
def program(kind: str, width: int = 1) -> Program:
    """Return the CUDA program of column sums for elements of type `kind`; a thread reads `width` elements at once."""
    definitions = (("TYPE", kind), ("WIDTH", width))
    return Program("column_sums", definitions, ARGUMENTS, ("column_sums", "partial_sums"), 512)


def examples() -> list[Program]:
    """Return example CUDA programs of column sums, for fp16 and bf16 matrices."""
    return [program("half"), program("bfloat16", 8)]


def launch_column_sums(loaded: Loaded, partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over R of fp32 partial sums [n, R, C] by the kernel `loaded`: [n, C], or [C] if n is 1."""
    count, rows, columns = partials.shape
    sums = partials.new_empty(*((count, columns) if count > 1 else (columns,)), dtype=dtype)
    arguments = ARGUMENTS.pack(partials.data_ptr(), sums.data_ptr(), 0, 0, rows, columns, count)
    loaded.launch("column_sums", count * -(-columns // 32), arguments)
    return sums


@cache
def row_shape(columns: int, width: int, most: int, most_threads: int) -> tuple[int, int] | None:
    """Return (threads, items) of a thread block that processes a row; None if the row exceeds a block's registers.

    Each thread has `items` vectors of `width` elements, and at most `most` elements. Up to 256 threads per block are
    preferred, because several such blocks hide each other's barriers. The next criteria are few idle threads, and
    several vectors per thread, whose loads overlap.
    """
    vectors = -(-columns // width)
    best: tuple[tuple[float, ...], int, int] | None = None
    for items in range(1, most // width + 1):
        threads = 32 * math.ceil(vectors / items / 32)
        if threads > most_threads:
            continue
        idle = items * threads / vectors - 1
        rank = (idle > 0.3, threads > 256, idle, -items) if vectors > 32 else (items,)
        if best is None or rank < best[0]:
            best = (rank, threads, items)
    return None if best is None else (best[1], best[2])


def row_grid(
    on: KernelLauncher, rows: int, columns: int, width: int, threads: int, per_processor: int = 2048
) -> tuple[int, int]:
    """Return the number of thread blocks of a grid, and the number of matrix rows that the grid processes at once.

    `width`: columns per thread. `threads`: threads per block. `per_processor`: maximum threads per multiprocessor.
    """
    vectors = columns // width
    needed, resident = rows * vectors, per_processor * on.processors  # numbers of threads
    blocks = -(-(needed if needed < resident else vectors if vectors > resident else resident) // threads)
    at_once = blocks * threads // vectors
    return blocks, at_once if at_once < rows else rows


def launch_sum_rows(on: KernelLauncher, rows: Tensor) -> Tensor:
    """Launch the kernels for partial and for final column sums, and return the column sums of a matrix."""
    rows = rows.contiguous()
    count, columns = rows.shape
    if not rows.numel():
        return rows.new_zeros(columns)
    width = read_width(columns, (rows,))
    kind = program(source_type(rows), width)
    loaded = on.load(kind)
    blocks, at_once = row_grid(on, count, columns, width, kind.threads, SUM_THREADS_PER_PROCESSOR)
    partials = rows.new_empty(1, at_once, columns, dtype=torch.float32)
    arguments = ARGUMENTS.pack(0, 0, rows.data_ptr(), partials.data_ptr(), count, columns, at_once)
    loaded.launch("partial_sums", blocks, arguments)
    return launch_column_sums(loaded, partials, rows.dtype)


def reference(rows: Tensor) -> Tensor:
    """Compute the column sums with plain torch operators in the dtype of the argument."""
    return rows.sum(0)


def _shape(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1:])


sum_operator = operator("sum_rows(Tensor rows) -> Tensor", reference, _shape, launch_sum_rows)


def sum_rows(x: Tensor, *, plain: bool = False) -> Tensor:
    """Return the sums [C] of x [..., C] over leading dimensions, accumulated in fp32, by the kernel or by torch."""
    return x.flatten(0, -2).sum(0) if plain or not x.is_cuda else sum_operator(flatten_rows(x))


def cost(rows: Operand) -> Cost:
    """Return the cost of column sums: 1 FLOP per element of the matrix."""
    return Cost(rows.numel, rows.nbytes, rows.shape[-1] * rows.itemsize)
