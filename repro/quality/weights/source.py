"""Weights on disk as flat fp32 elements of one parameter's tensor-parallel part.

Files are mapped into memory, so that a rank reads only its heads under tensor parallelism and its shard under stage 3.
`StoredRows` reads formats whose tensors consist of rows of our parameters. `Counterpart` describes such a tensor, for
reading and for writing. `RunCheckpoint` reads the suite's own checkpoints.
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

from repro.config import ConfigError, Layout, Model, Training
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, matrix_rows, rectangles
from repro.model.gpt import GPT
from repro.model.layer import KEYS_AND_VALUES
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import InitialValues

TOKEN_EMBEDDING = "embed.tokens"
VOCAB_PARAMETERS = (TOKEN_EMBEDDING, "head.output")
"""Parameters with one row per token, which a larger vocabulary pads with zeros."""


class ParameterShape(NamedTuple):
    """Shape of a parameter of the full model, and the dimension that tensor parallelism splits."""

    shape: tuple[int, ...]
    split: int | None


class WeightSource(ABC):
    """Weights of one folder."""

    kind: str
    """Name of the format, for messages and records."""
    model: Model
    files: tuple[Path, ...]
    """Files with weights, without those that describe them."""

    @cached_property
    def parameter_shapes(self) -> dict[str, ParameterShape]:
        """Shapes of the model's parameters by name."""
        gpt = GPT(self.model, Layout(), Training(), meshes.single_rank_mesh().tp)
        return {name: ParameterShape(tuple(p.shape), vars(p)["split"]) for name, p in gpt.named_parameters()}

    @abstractmethod
    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        """Return elements start..stop, flat fp32, of the part of a parameter on tp rank `rank` of `ranks`.

        `rows` is the padded length of the first dimension; 0 adds no padding. Padding is zero.
        """

    def check(self) -> None:
        """Read redundant copies of parameters, and raise `ConfigError` where they differ."""
        return

    def values(self, names: Sequence[str], rank: int, ranks: int, vocab: int) -> InitialValues:
        """Return a function that reads a rank's part of the parameters `names`, with `vocab` tokens."""
        replicated = KEYS_AND_VALUES if ranks > self.model.key_heads else ()

        def read_elements(i: int, start: int, stop: int) -> Tensor:
            if names[i].endswith(replicated):
                return self.elements(names[i], start, stop)
            rows = vocab if names[i] in VOCAB_PARAMETERS else 0
            return self.elements(names[i], start, stop, rank, ranks, rows)

        return read_elements


class RowRange(NamedTuple):
    """Consecutive rows of one of our parameters.

    A weight [..., n] has the rows of all its matrices, a bias has rows of one element.
    """

    ours: str
    first: int
    rows: int


class Counterpart(NamedTuple):
    """Tensor of another library, and the rows of our parameters that it contains in this order."""

    theirs: str
    shape: tuple[int, ...]
    row_ranges: tuple[RowRange, ...]
    transposed: bool = False
    """Whether the file stores the tensor as [in, out]; rows belong to [out, in]."""

    @property
    def width(self) -> int:
        """Elements of a row."""
        return 1 if len(self.shape) == 1 else self.shape[0 if self.transposed else 1]

    def read_slices(self, source: WeightSource, rows: int = 0) -> Iterator[Tensor]:
        """Yield the tensor's elements from `source` in order, as fp32 slices.

        `rows` limits the rows of each range, to leave out padding; 0 is no limit.
        """
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
    """Return the counterpart with their `shape` that equals one of our parameters or its transpose."""
    rows = shape[1] if transposed else shape[0]
    return Counterpart(theirs, shape, (RowRange(ours, 0, rows),), transposed)


class StoredRows(WeightSource):
    """Mapped tensors whose rows are rows of our parameters."""

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
        """First row and rows [n, width] of each piece of a parameter, in order, as views."""
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
        while at < last:  # a rank has consecutive rows of every block
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
        """Yield the rows first..last of a parameter, with zeros after the last stored row."""
        for begin, piece in self.stored[name]:
            low, high = max(first, begin), min(last, begin + piece.shape[0])
            if low < high:
                yield piece.narrow(0, low - begin, high - low)
                first = high
        if first < last:
            yield torch.zeros(last - first, width)


class RunCheckpoint(WeightSource):
    """Optimizer's fp32 weights in a checkpoint of `repro run` (folder `step-N`), written under any layout."""

    kind = "repro checkpoint"

    def __init__(self, folder: Path):
        self._folder, self._index = folder, index.read_index(folder)
        index.check_files(folder, self._index)
        self.files = tuple(folder / name for name in self._index.sizes)
        path = folder / index.FILE
        try:
            self.model = Model(**{**self._index.training["model"], "name": name_from_folder(folder.parent)})
        except (KeyError, TypeError):
            raise ConfigError("model", says="is not among what the checkpoint says", file=str(path)) from None
        for name, expected in self.parameter_shapes.items():
            if (shape := self._index.shapes.get(name)) != expected.shape:
                raise ConfigError(name, shape, f"of shape {expected.shape}", file=str(path))
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
            there = rectangle.overlap(full)  # padding of the vocabulary has no overlap and stays zero
            if there is not None:
                self._read(name, "weight", there, found[before : before + there.size])
        return found


def name_from_folder(path: Path) -> str:
    """Return a model's name from the name of its folder."""
    return path.resolve().name.lstrip(".-").strip() or "weights"


def check_tensors(
    location: str,
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Tensor],
    ignored: Iterable[str] = (),
) -> None:
    """Raise `ConfigError` unless `found` has the expected names and shapes; `ignored` names are optional."""
    faults = []
    missing = [name for name in expected if name not in found]
    unexpected = sorted(found.keys() - expected.keys() - set(ignored))
    wrong = [
        f"{name} is {list(found[name].shape)} where {list(shape)} is right"
        for name, shape in expected.items()
        if name in found and list(found[name].shape) != list(shape)
    ]
    for words, names in (("lacks", missing), ("has what our GPT has not:", unexpected), ("", wrong)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            faults.append(f"{words} {names[0]}{more}".strip())
    if faults:
        raise ConfigError("weights", says="; ".join(faults), file=location)
