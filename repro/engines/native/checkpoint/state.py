"""Training state in a checkpoint: fp32 weights, Adam's moments, the number of steps and the state of the loss scaler.

A parameter is stored as a matrix whose rows are the dimensions before the one that tp splits, so that a tp rank has a
block of columns. ZeRO divides this block row by row, so that a ZeRO shard consists of at most three rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import ModelPart
from repro.parallel.zero.flat_buffer import Bucket


class Rectangle(NamedTuple):
    """Rectangle of `rows` x `columns` elements of a matrix, from element (`row`, `column`) on, stored row by row."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def size(self) -> int:
        """Return the number of elements in the matrix block."""
        return self.rows * self.columns

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """Return the intersection with another rectangle of the matrix; None if the intersection is empty."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rectangle(row, rows, column, columns) if rows > 0 and columns > 0 else None

    def view(self, flat: Tensor, part: Rectangle) -> Tensor:
        """Return a view [rows, columns] of the sub-block `part` of this matrix block, whose elements are in `flat`."""
        row, column = part.row - self.row, part.column - self.column
        matrix = flat.view(self.rows, self.columns)
        return matrix[row : row + part.rows, column : column + part.columns]


def matrix_rows(shape: Sequence[int], split: int | None) -> int:
    """Return the number of rows of a parameter as a matrix: the product of the dimensions before `split`.

    `split`: dimension that tp splits; None if tp does not split the parameter, which then has one row.
    """
    return 1 if split is None else math.prod(shape[:split])


def rectangles(first: int, last: int, left: int, width: int) -> list[tuple[Rectangle, int]]:
    """Return rectangles that cover elements `first` to `last` - 1 (row by row) of a tp rank's block of a matrix.

    `left`, `width`: first column and number of columns of the block. Each rectangle is returned with the number of
    elements between `first` and its start.
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


STATES = ("weight", "moment1", "moment2")
"""Names of the fp32 values that a checkpoint stores for each parameter element: the weight and Adam's moments."""
_SCALER = ("scale", "good_steps", "tolerance")


@dataclass(frozen=True)
class Fragment:
    """Block (rectangle) of a parameter's matrix, with the block's weights and moments in this rank's optimizer."""

    name: str
    """Name of the parameter in the full model."""
    shape: tuple[int, ...]
    """Shape of the full parameter, not split by tp or ZeRO."""
    rows: int
    """Number of rows of the full parameter as a matrix (`matrix_rows`)."""
    rectangle: Rectangle
    states: tuple[Tensor, ...]
    """Flat fp32 views of the rectangle's weights, first moments and second moments."""


def fragments(engine: NativeEngine, *, owned: bool) -> Iterator[Fragment]:
    """Yield the parameter blocks (rectangles) that this rank's optimizer updates; with `owned`, only those it saves.

    If several ranks have equal states, only one saves them: the first tp rank for parameters that tp duplicates, and
    the first stage for the tied embedding. Under ZeRO stage 0 each replica saves an equal part.
    """
    moments = iter(engine.optimizer.moments)
    for part in engine.parts:
        for bucket in part.sharded.buckets:
            first, second = next(moments)
            yield from _of_bucket(engine, part, bucket, (bucket.master, first, second), owned)


def _of_bucket(
    engine: NativeEngine, part: ModelPart, bucket: Bucket, states: tuple[Tensor, ...], owned: bool
) -> Iterator[Fragment]:
    tp, sharded = engine.mesh.tp, part.sharded
    splits, slots = part.splits(), {slot.index: slot for slot in bucket.plan.slots}
    pieces, base = bucket.pieces(), 0
    if owned and not bucket.stage:
        pieces, base = bucket.plan.pieces(bucket.group.rank), bucket.group.rank * bucket.plan.shard
    for index, first, last, place in pieces:
        tag = slots[index].tag
        if owned and ((tag.duplicate and tp.rank) or (tag.tied and engine.mesh.pp.rank)):
            continue
        name = part.name_in_model(sharded.names[index])
        local, split = sharded.shapes[index], splits[name]
        shape = tuple(n * tp.size if d == split else n for d, n in enumerate(local))
        rows = matrix_rows(shape, split)
        width = local.numel() // rows
        left = 0 if split is None else tp.rank * width
        for rectangle, before in rectangles(first, last, left, width):
            start = base + place + before
            here = tuple(state[start : start + rectangle.size] for state in states)
            yield Fragment(name, shape, rows, rectangle, here)


def scalars(engine: NativeEngine) -> dict[str, Any]:
    """Return the scalar training state: optimizer steps without skipped ones, and in fp16 the loss scaler's state."""
    scaler = engine.scaler
    return {
        "optimizer_steps": float(engine.optimizer.step_count),
        "scaler": None if scaler is None else {key: float(getattr(scaler, key)) for key in _SCALER},
    }


def restore_states(
    engine: NativeEngine, numbers: dict[str, Any], read: Callable[[str, str, Rectangle, Tensor], None]
) -> None:
    """Restore the training state of a new engine from a checkpoint, and gather its parameters.

    `numbers`: scalar state that `scalars` returned. `read(parameter, state, rectangle, tensor)` fills a flat tensor
    with a block of the parameter's fp32 weights or of an Adam moment.
    """
    with torch.no_grad():
        for fragment in fragments(engine, owned=False):
            for state, tensor in zip(STATES, fragment.states, strict=True):
                read(fragment.name, state, fragment.rectangle, tensor)
        for bucket in engine.buckets:
            if bucket.master is not bucket.shard:
                bucket.shard.copy_(bucket.master)
        engine.optimizer.step_count.fill_(numbers["optimizer_steps"])
        if engine.scaler is not None:
            for key, value in numbers["scaler"].items():
                getattr(engine.scaler, key).fill_(value)
        for part in engine.parts:
            part.sharded.all_gather_params()
    engine.synchronize()
