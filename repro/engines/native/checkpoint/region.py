"""Which part of a parameter a rank holds, whatever the layout.

Tensor parallelism splits a parameter along one dimension.  Seen as a matrix with everything before that
dimension as rows, a tp rank holds a block of columns; ZeRO then cuts that block, row by row, anywhere
(1910.02054 sec. 5.1: "equal partitions").  Such a cut is at most three rectangles: a part of a row, whole
rows, a part of a row.  Numbers are elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Rectangle(NamedTuple):
    """`rows` x `columns` elements of a matrix, from (`row`, `column`) on; stored row by row."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """What both have; None if that is nothing."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rectangle(row, rows, column, columns) if rows > 0 and columns > 0 else None

    def view(self, flat: Tensor, part: Rectangle) -> Tensor:
        """`part` [rows, columns] of this rectangle, whose elements are `flat`."""
        row, column = part.row - self.row, part.column - self.column
        matrix = flat.view(self.rows, self.columns)
        return matrix[row : row + part.rows, column : column + part.columns]


def matrix_rows(shape: Sequence[int], split: int | None) -> int:
    """Rows of a parameter as a matrix: what comes before the dimension that tp splits; 1 where it splits none."""
    return 1 if split is None else math.prod(shape[:split])


def rectangles(first: int, last: int, left: int, width: int) -> list[tuple[Rectangle, int]]:
    """Elements `first` to `last` - 1, counted row by row, of the columns `left` to `left + width` - 1.

    With each rectangle comes how many of these elements are before it.
    """
    found: list[tuple[Rectangle, int]] = []
    start = first
    while start < last:
        row, column = divmod(start, width)
        rows, columns = 1, min(width - column, last - start)
        if column == 0 and last - start >= width:
            rows, columns = (last - start) // width, width
        found.append((Rectangle(row, rows, left + column, columns), start - first))
        start += rows * columns
    return found
