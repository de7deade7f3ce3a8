"""The suite's checkpoints (`repro.engines.native.checkpoint`): the optimizer's fp32 weights, of any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, matrix_rows, rectangles
from repro.quality.weights.source import Source, name_of


class Own(Source):
    """A checkpoint's folder, `step-N`."""

    kind = "repro checkpoint"

    def __init__(self, folder: Path):
        self._folder, self._index = folder, index.read_index(folder)
        index.check_files(folder, self._index)
        self.files = tuple(folder / name for name in self._index.sizes)
        path = folder / index.FILE
        try:
            self.model = Model(**{**self._index.training["model"], "name": name_of(folder.parent)})
        except (KeyError, TypeError):
            raise ConfigError("model", says="is not among what the checkpoint says", file=str(path)) from None
        for name, place in self.places.items():
            if self._index.shapes.get(name) != place.shape:
                raise ConfigError(
                    name, self._index.shapes.get(name), f"of shape {place.shape}", file=str(path)
                )
        self._fill = index.reading(folder, self._index, files.Reader())

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        shape, split = self.places[name]
        lines = matrix_rows(shape, split)
        whole = Rectangle(0, lines, 0, torch.Size(shape).numel() // lines)
        width = whole.columns * (rows or shape[0]) // shape[0] // (1 if split is None else ranks)
        found = torch.zeros(stop - start)
        for rectangle, before in rectangles(start, stop, 0 if split is None else rank * width, width):
            there = rectangle.overlap(whole)  # beyond it are the zeros of a padded vocabulary
            if there is not None:
                self._fill(name, "weight", there, found[before : before + there.size])
        return found
