"""Sums of columns, the last part of every gradient of a weight or bias, and the distribution of rows over threads."""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Loaded, Program

ARGUMENTS = struct.Struct("@PPiii0q")


@cache
def program(kind: str) -> Program:
    """Return the program for sums of this type."""
    return Program("column_sums", (("TYPE", kind),), ARGUMENTS, ("column_sums",), 512)


def examples() -> list[Program]:
    """Return the program of 16-bit sums."""
    return [program("half")]


def launch_column_sums(loaded: Loaded, partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the kernel on fp32 [n, R, C] and return [n, C] in `dtype`, or [C] if n is 1; `loaded` has this type."""
    count, rows, columns = partials.shape
    sums = partials.new_empty(*((count, columns) if count > 1 else (columns,)), dtype=dtype)
    arguments = ARGUMENTS.pack(partials.data_ptr(), sums.data_ptr(), rows, columns, count)
    loaded.launch("column_sums", count * -(-columns // 32), arguments)
    return sums


def plain_column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of a [R, C] matrix over its rows, accumulated in fp32 at least, as `dtype` [C]."""
    return rows.sum(0).to(dtype)


@cache
def row_shape(columns: int, width: int, most: int, most_threads: int) -> tuple[int, int] | None:
    """Return (threads, items) of a block: a row of `columns` as `items` vectors of `width` elements per thread.

    A thread has at most `most` elements. Blocks of up to 256 threads are preferred because they hide barriers, then few
    idle threads, then several vectors per thread, whose loads overlap. Return None for a row that does not fit.
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


def row_grid(on: KernelLauncher, rows: int, columns: int, width: int, threads: int) -> tuple[int, int]:
    """Return (blocks, rows at once) of a grid with `width` columns per thread and 2048 threads per multiprocessor."""
    vectors = columns // width
    work, room = rows * vectors, 2048 * on.processors
    blocks = -(-(work if work < room else vectors if vectors > room else room) // threads)
    at_once = blocks * threads // vectors
    return blocks, at_once if at_once < rows else rows
