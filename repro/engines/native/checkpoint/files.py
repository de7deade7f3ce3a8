"""Checkpoint file of a rank in the safetensors format: fp32 blocks (rectangles) of parameters stored as matrices.

Tensors are written and read in slices, to limit the memory of copies, and a reader reads only the requested bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.config import ConfigError, require
from repro.engines.native.checkpoint.state import Rectangle

SLICE = 1 << 22
"""Maximum number of fp32 elements that one read or write transfers between a tensor and a checkpoint file."""
GAP = 1 << 14
"""Maximum number of unrequested fp32 elements between two requested rows that one read includes (64 KiB)."""
ITEM = 4
"""Size of an fp32 element, in bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint file: a matrix block of the weights or of a moment (`state`) of parameter `name`."""

    name: str
    state: str
    rectangle: Rectangle

    @property
    def title(self) -> str:
        """Return the unique name of the tensor in the checkpoint file."""
        row, rows, column, columns = self.rectangle
        return f"{self.name}/{self.state}/{row}:{row + rows},{column}:{column + columns}"


def write_rank_file(
    path: Path,
    entries: Sequence[tuple[TensorEntry, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    progress: Callable[[], None],
) -> None:
    """Write a rank's checkpoint file with flat fp32 tensors, and wait until it is on disk.

    `shapes`: shapes of the full parameters by name. `progress`: function that is called after each written slice.
    """
    metadata = {name: " ".join(map(str, shape)) for name, shape in shapes.items()}
    tensors = {entry.title: (entry.rectangle, tensor) for entry, tensor in entries}

    def read_slices(title: str) -> Iterator[Tensor]:
        rectangle, tensor = tensors[title]
        assert tensor.numel() == rectangle.size
        for part in tensor.detach().split(SLICE):
            yield part.cpu()
            progress()

    sizes = {title: [rectangle.rows, rectangle.columns] for title, (rectangle, _) in tensors.items()}
    write_safetensors(path, sizes, read_slices, metadata)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    read_slices: Callable[[str], Iterable[Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file of fp32 tensors of the `shapes` to disk; `read_slices` yields a tensor's elements."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + ITEM * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for part in read_slices(name):
                assert part.dtype == torch.float32
                file.write(memoryview(part.contiguous().numpy().data).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_contents(path: Path) -> tuple[list[tuple[TensorEntry, int]], dict[str, tuple[int, ...]]]:
    """Return the tensors in a rank's checkpoint file with their offsets in bytes, and the shapes of the parameters."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    metadata: dict[str, str] = header.pop("__metadata__")
    shapes = {name: tuple(map(int, text.split())) for name, text in metadata.items()}
    found = []
    for title, value in header.items():
        name, state, place = title.rsplit("/", 2)
        (row, _), (column, _) = (part.split(":") for part in place.split(","))
        rows, columns = value["shape"]
        entry = TensorEntry(name, state, Rectangle(int(row), rows, int(column), columns))
        found.append((entry, 8 + length + value["data_offsets"][0]))
    return found, shapes


class Reader:
    """Context manager that reads parts of tensors from checkpoint files, which remain open inside the context."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._buffer = torch.empty(0)
        self.bytes_read = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, path: Path, at: int, holder: Rectangle, part: Rectangle, into: Tensor) -> None:
        """Read `part` of matrix block `holder`, stored from byte `at` on; `ConfigError` if the file is missing."""
        for block in _blocks(holder, part):
            first = (block.row - holder.row) * holder.columns + block.column - holder.column
            span = (block.rows - 1) * holder.columns + block.columns
            flat = self._elements(path, at + ITEM * first, span)
            rows = flat.as_strided((block.rows, block.columns), (holder.columns, 1))
            row, column = block.row - part.row, block.column - part.column
            into[row : row + block.rows, column : column + block.columns].copy_(rows)

    def _elements(self, path: Path, at: int, count: int) -> Tensor:
        """Read `count` fp32 elements of a file from byte `at` on; the result is valid until the next read."""
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(error.strerror or "cannot be read", file=str(path)) from None
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count)
        raw = memoryview(self._buffer.numpy().data).cast("B")[: ITEM * count]
        done = 0
        while done < len(raw):
            got = os.preadv(self._open[path], [raw[done:]], at + done)
            require(got, f"ends before byte {at + len(raw)}", says="the file is incomplete", file=str(path))
            done += got
        self.bytes_read += done
        return self._buffer[:count]


def _blocks(holder: Rectangle, part: Rectangle) -> Iterator[Rectangle]:
    """Divide the matrix block `part` into blocks that one file read covers: several full rows, or at most one row."""
    columns = min(part.columns, SLICE)
    together = 1
    if columns == part.columns and holder.columns - columns <= GAP:
        together = max(1, SLICE // holder.columns)
    for row in range(part.row, part.row + part.rows, together):
        rows = min(together, part.row + part.rows - row)
        for column in range(part.column, part.column + part.columns, columns):
            yield Rectangle(row, rows, column, min(columns, part.column + part.columns - column))
