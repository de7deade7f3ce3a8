"""Binding of `column_sums.cu`, which ends every gradient of a weight or bias, and how rows are spread on threads."""

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
    """For sums of this type."""
    return Program("column_sums", (("TYPE", kind),), ARGUMENTS, ("column_sums",), 512)


def examples() -> list[Program]:
    """Sums of 16 bits."""
    return [program("half")]


def column_sums(loaded: Loaded, partials: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [n, R, C] -> [n, C] in the dtype, [C] where n is 1; `loaded` is the program of that type."""
    count, rows, columns = partials.shape
    sums = partials.new_empty(*((count, columns) if count > 1 else (columns,)), dtype=dtype)
    arguments = ARGUMENTS.pack(partials.data_ptr(), sums.data_ptr(), rows, columns, count)
    loaded.launch("column_sums", count * -(-columns // 32), arguments)
    return sums


@cache
def row_shape(columns: int, width: int, most: int, most_threads: int) -> tuple[int, int] | None:
    """(threads, items): a row of `columns` in `items` vectors of `width` elements a thread.

    At most `most` elements a thread; preferably up to 256 threads, since small blocks hide each other's barriers,
    few of them idle, with several vectors each, whose loads overlap. None where a row does not fit.
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


def spread(on: KernelLauncher, rows: int, columns: int, width: int, threads: int) -> tuple[int, int]:
    """(blocks, rows at once) of a grid whose threads keep `width` columns each: 2048 threads a multiprocessor."""
    vectors = columns // width
    work, room = rows * vectors, 2048 * on.processors
    blocks = -(-(work if work < room else vectors if vectors > room else room) // threads)
    at_once = blocks * threads // vectors
    return blocks, at_once if at_once < rows else rows
