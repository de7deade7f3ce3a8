"""Tensors of others whose rows are, stretch by stretch, rows of our parameters: there and back.

A parameter is seen as a matrix [R, n]: of a weight [..., n] all rows of all its matrices, of a bias single elements.
Libraries differ in which of these rows lie together in which tensor; a model file says it once, as `Counterpart`s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import Model
from repro.engines.native.checkpoint.files import SLICE
from repro.quality.weights.source import Source


class Stretch(NamedTuple):
    """Rows of one of our parameters, one after the other."""

    ours: str
    first: int
    rows: int


class Counterpart(NamedTuple):
    """One of their tensors, and the rows of ours that it consists of."""

    theirs: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    transposed: bool = False
    """Whether it is stored as [in, out], where rows are of [out, in]."""

    @property
    def width(self) -> int:
        """Elements of a row."""
        return 1 if len(self.shape) == 1 else self.shape[0 if self.transposed else 1]


def same(theirs: str, ours: str, *shape: int, transposed: bool = False) -> Counterpart:
    """A tensor that is one of ours, or its transpose; `shape` is theirs."""
    rows = shape[1] if transposed else shape[0]
    return Counterpart(theirs, shape, (Stretch(ours, 0, rows),), transposed)


class StoredRows(Source):
    """Weights whose files are mapped as tensors, by the rows of our parameters."""

    def __init__(
        self,
        kind: str,
        model: Model,
        files: Iterable[Path],
        counterparts: Iterable[Counterpart],
        found: Mapping[str, Tensor],
    ):
        self.kind, self.model, self.files = kind, model, tuple(files)
        self.stored: dict[str, list[tuple[int, Tensor]]] = {}
        """Of each parameter first rows and rows [n, width], in their order; nothing is copied."""
        for pair in counterparts:
            tensor = found[pair.theirs]
            rows = tensor.t() if pair.transposed else tensor.view(-1, pair.width)
            at = 0
            for stretch in pair.stretches:
                piece = rows.narrow(0, at, stretch.rows)
                self.stored.setdefault(stretch.ours, []).append((stretch.first, piece))
                at += stretch.rows
        for pieces in self.stored.values():
            pieces.sort(key=lambda piece: piece[0])

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        shape, split = list(self.places[name].shape), self.places[name].split
        shape[0] = rows or shape[0]
        width = self.stored[name][0][1].shape[1]
        if split is None:
            rank, ranks, split = 0, 1, 0
        inner = math.prod(shape[split + 1 :])
        by_columns = inner < width
        columns = width // ranks if by_columns else width
        block = math.prod(shape) // width if by_columns else shape[split] * inner // width
        kept = block if by_columns else block // ranks
        offset = 0 if by_columns else rank * kept
        first, last = start // columns, -(-stop // columns)
        found: list[Tensor] = []
        at = first
        while at < last:  # a rank's rows are a stretch of every block
            number, row = divmod(at, kept)
            end = min(last, (number + 1) * kept)
            begin = number * block + offset + row
            found += self._rows(name, begin, begin + end - at, width)
            at = end
        whole = torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0, width)
        if by_columns:
            whole = whole.narrow(1, rank * columns, columns)
        return whole.reshape(-1)[start - first * columns : stop - first * columns].float()

    def _rows(self, name: str, first: int, last: int, width: int) -> Iterator[Tensor]:
        """Rows first..last in the order of the parameter; beyond what there is, zeros."""
        for begin, piece in self.stored[name]:
            low, high = max(first, begin), min(last, begin + piece.shape[0])
            if low < high:
                yield piece.narrow(0, low - begin, high - low)
                first = high
        if first < last:
            yield torch.zeros(last - first, width)


def pieces(source: Source, pair: Counterpart, rows: int = 0) -> Iterator[Tensor]:
    """The elements of one of their tensors in their order, fp32; of a long stretch in slices.

    `rows`: as many of its rows, where there is padding behind them; 0: all.
    """
    width = pair.width
    if pair.transposed:
        found = [_stretch(source, stretch, width) for stretch in pair.stretches]
        yield torch.cat([piece for stretch in found for piece in stretch]).view(-1, width).t()
        return
    for stretch in pair.stretches:
        yield from _stretch(source, stretch._replace(rows=rows or stretch.rows), width)


def _stretch(source: Source, stretch: Stretch, width: int) -> Iterator[Tensor]:
    begin, end = stretch.first * width, (stretch.first + stretch.rows) * width
    for start in range(begin, end, SLICE):
        yield source.elements(stretch.ours, start, min(start + SLICE, end))
