"""Common interface of weights on disk (`WeightSource`): flat fp32 elements of a parameter's tensor-parallel part.

Files are mapped into memory, so that a rank reads only its part. `StoredRows` reads formats whose tensors consist of
rows of this suite's parameters (`Counterpart`), and `RunCheckpoint` reads checkpoints of this suite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import ConfigError, Layout, Model, Training, require
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, matrix_rows, rectangles
from repro.model.gpt import GPT
from repro.model.layer import KEYS_AND_VALUES
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import InitialValues

TOKEN_EMBEDDING = "embed.tokens"
VOCAB_PARAMETERS = (TOKEN_EMBEDDING, "head.output")
"""Names of the parameters with one row per token of the vocabulary, which rows of zeros may pad."""


class ParameterShape(NamedTuple):
    """Shape of a parameter of the full model, and the dimension that tensor parallelism splits (None: replicated)."""

    shape: tuple[int, ...]
    split: int | None


class WeightSource(ABC):
    """Weights of a model in one folder, whose elements are read on demand."""

    kind: str
    """Name of the format of the weight files, for messages and records."""
    model: Model
    files: tuple[Path, ...]
    """Files that contain weights, without configuration and index files."""

    @cached_property
    def parameter_shapes(self) -> dict[str, ParameterShape]:
        """Return the shapes of the model's parameters by name."""
        gpt = GPT(self.model, Layout(), Training(), meshes.single_rank_mesh().tp)
        return {name: ParameterShape(tuple(p.shape), vars(p)["split"]) for name, p in gpt.named_parameters()}

    @abstractmethod
    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        """Return flat fp32 elements `start` to `stop` of a tp rank's part; `rows`: padded first dimension, or 0."""

    def check(self) -> None:
        """Raise `ConfigError` if redundant copies of a parameter in the weight files differ."""
        return

    def values(self, names: Sequence[str], rank: int, ranks: int, vocab: int) -> InitialValues:
        """Return a function that reads elements of a tp rank's part of parameters `names`. `vocab`: padded size."""
        replicated = KEYS_AND_VALUES if ranks > self.model.key_heads else ()

        def read_elements(i: int, start: int, stop: int) -> Tensor:
            if names[i].endswith(replicated):
                return self.elements(names[i], start, stop)
            rows = vocab if names[i] in VOCAB_PARAMETERS else 0
            return self.elements(names[i], start, stop, rank, ranks, rows)

        return read_elements


class RowRange(NamedTuple):
    """Consecutive rows of a parameter of this suite's GPT.

    A weight [..., n] has rows of n elements, and a bias has rows of one element.
    """

    ours: str
    first: int
    rows: int


class Counterpart(NamedTuple):
    """Tensor of another library, and the rows of this suite's parameters that the tensor contains, in order."""

    theirs: str
    shape: tuple[int, ...]
    row_ranges: tuple[RowRange, ...]
    transposed: bool = False
    """Whether the file stores the tensor as [in, out]; `row_ranges` are rows of [out, in]."""

    @property
    def width(self) -> int:
        """Return the number of elements in a row of the tensor; 1 for a bias."""
        return 1 if len(self.shape) == 1 else self.shape[0 if self.transposed else 1]

    def read_slices(self, source: WeightSource, rows: int = 0) -> Iterator[Tensor]:
        """Yield another library's tensor from `source` in fp32 slices; `rows` limits rows to omit padding (0: none)."""
        if self.transposed:
            parts = [part for row_range in self.row_ranges for part in self._read_range(source, row_range)]
            yield torch.cat(parts).view(-1, self.width).t()
            return
        for row_range in self.row_ranges:
            yield from self._read_range(source, row_range._replace(rows=rows or row_range.rows))

    def _read_range(self, source: WeightSource, part: RowRange) -> Iterator[Tensor]:
        end = (part.first + part.rows) * self.width
        for start in range(part.first * self.width, end, files.SLICE):
            yield source.elements(part.ours, start, min(start + files.SLICE, end))


def counterpart(theirs: str, ours: str, *shape: int, transposed: bool = False) -> Counterpart:
    """Return the description of another library's tensor that equals the GPT's parameter `ours` or its transpose."""
    rows = shape[1] if transposed else shape[0]
    return Counterpart(theirs, shape, (RowRange(ours, 0, rows),), transposed)


class StoredRows(WeightSource):
    """Weights in memory-mapped tensors of another library, whose rows are rows of this suite's parameters."""

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
        """Pieces of each parameter in order: number of the piece's first row, and its tensor view [rows, width]."""
        for pair in counterparts:
            tensor = found[pair.theirs]
            rows = tensor.t() if pair.transposed else tensor.view(-1, pair.width)
            at = 0
            for part in pair.row_ranges:
                piece = rows.narrow(0, at, part.rows)
                self.stored.setdefault(part.ours, []).append((part.first, piece))
                at += part.rows
        for pieces in self.stored.values():
            pieces.sort(key=lambda piece: piece[0])

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        shape, split = list(self.parameter_shapes[name].shape), self.parameter_shapes[name].split
        shape[0] = rows or shape[0]
        width = self.stored[name][0][1].shape[1]
        if split is None:
            rank, ranks, split = 0, 1, 0
        inner = math.prod(shape[split + 1 :])
        by_columns = inner < width
        columns = width // ranks if by_columns else width
        block_rows = math.prod(shape) // width if by_columns else shape[split] * inner // width
        rank_rows = block_rows if by_columns else block_rows // ranks
        offset = 0 if by_columns else rank * rank_rows
        first, last = start // columns, -(-stop // columns)
        found: list[Tensor] = []
        at = first
        # In each block of a parameter that is split over tp ranks, the rows of a rank are consecutive.
        while at < last:
            number, row = divmod(at, rank_rows)
            end = min(last, (number + 1) * rank_rows)
            begin = number * block_rows + offset + row
            found += self._rows(name, begin, begin + end - at, width)
            at = end
        full = torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0, width)
        if by_columns:
            full = full.narrow(1, rank * columns, columns)
        return full.reshape(-1)[start - first * columns : stop - first * columns].float()

    def _rows(self, name: str, first: int, last: int, width: int) -> Iterator[Tensor]:
        """Yield the rows `first` to `last` (exclusive) of a parameter; rows after the last stored row are zeros."""
        for begin, piece in self.stored[name]:
            low, high = max(first, begin), min(last, begin + piece.shape[0])
            if low < high:
                yield piece.narrow(0, low - begin, high - low)
                first = high
        if first < last:
            yield torch.zeros(last - first, width)


class RunCheckpoint(WeightSource):
    """The optimizer's fp32 weights in a checkpoint of `repro run` (folder `step-N`), of any layout."""

    kind = "repro checkpoint"

    def __init__(self, folder: Path):
        self._folder, self._index = folder, index.read_index(folder)
        index.check_files(folder, self._index)
        self.files = tuple(folder / name for name in self._index.sizes)
        path = folder / index.FILE
        try:
            self.model = Model(**{**self._index.training["model"], "name": name_from_folder(folder.parent)})
        except (KeyError, TypeError):
            says = "is missing or invalid in the index of the checkpoint"
            raise ConfigError("model", says=says, file=str(path)) from None
        for name, expected in self.parameter_shapes.items():
            if (shape := self._index.shapes.get(name)) != expected.shape:
                raise ConfigError(name, shape, f"a parameter of shape {expected.shape}", file=str(path))
        self._read = index.reading(folder, self._index, files.Reader())

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        shape, split = self.parameter_shapes[name]
        lines = matrix_rows(shape, split)
        full = Rectangle(0, lines, 0, torch.Size(shape).numel() // lines)
        width = full.columns * (rows or shape[0]) // shape[0] // (1 if split is None else ranks)
        found = torch.zeros(stop - start)
        for rectangle, before in rectangles(start, stop, 0 if split is None else rank * width, width):
            there = rectangle.overlap(full)  # None for padding rows of the vocabulary; their weights stay 0
            if there is not None:
                self._read(name, "weight", there, found[before : before + there.size])
        return found


def name_from_folder(path: Path) -> str:
    """Return the name of a model, which is the name of its folder."""
    return path.resolve().name.lstrip(".-").strip() or "weights"


def check_tensors(
    location: str,
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Tensor],
    ignored: Iterable[str] = (),
) -> None:
    """Raise `ConfigError` unless the tensors `found` have the expected names and shapes; `ignored` are optional."""
    faults = []
    missing = [name for name in expected if name not in found]
    unexpected = sorted(found.keys() - expected.keys() - set(ignored))
    wrong = [
        f"{name} has shape {list(found[name].shape)} and must have shape {list(shape)}"
        for name, shape in expected.items()
        if name in found and list(found[name].shape) != list(shape)
    ]
    for words, names in (("missing tensor", missing), ("unknown tensor", unexpected), ("", wrong)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            faults.append(f"{words} {names[0]}{more}".strip())
    require(not faults, "weights", says="; ".join(faults), file=location)
