"""Formats of weights: the suite's checkpoints, and the function that detects the format of a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, matrix_rows, rectangles
from repro.quality.weights import huggingface, megatron
from repro.quality.weights.source import WeightSource, name_from_folder

KNOWN_FORMATS = (
    "a folder of transformers (config.json), of Megatron-LM (latest_checkpointed_iteration.txt or mp_rank_00), "
    "or of a checkpoint of `repro run` (index.json, or step-N with one)"
)


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
            if self._index.shapes.get(name) != expected.shape:
                raise ConfigError(
                    name, self._index.shapes.get(name), f"of shape {expected.shape}", file=str(path)
                )
        self._read = index.reading(folder, self._index, files.Reader())

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        shape, split = self.parameter_shapes[name]
        lines = matrix_rows(shape, split)
        whole = Rectangle(0, lines, 0, torch.Size(shape).numel() // lines)
        width = whole.columns * (rows or shape[0]) // shape[0] // (1 if split is None else ranks)
        found = torch.zeros(stop - start)
        for rectangle, before in rectangles(start, stop, 0 if split is None else rank * width, width):
            there = rectangle.overlap(whole)  # padding of the vocabulary has no overlap and stays zero
            if there is not None:
                self._read(name, "weight", there, found[before : before + there.size])
        return found


def open_weights(folder: Path, model: Model | None = None) -> WeightSource:
    """Return the weights in `folder` after a check of their names and shapes, without reading elements.

    `model` gives the number of heads, which old checkpoints of Megatron-LM lack. Raises `ConfigError`.
    """
    if not folder.is_dir():
        raise ConfigError("--weights", str(folder), KNOWN_FORMATS)
    if (folder / index.FILE).is_file():
        return RunCheckpoint(folder)
    if steps := index.complete(folder):
        return RunCheckpoint(index.folder_of(folder, steps[-1]))
    if (folder / huggingface.CONFIG_FILE).is_file():
        return huggingface.HuggingFaceFolder(folder)
    if (shards := megatron.find_rank_folders(folder)) is not None:
        return megatron.MegatronCheckpoint(shards, model)
    raise ConfigError("--weights", str(folder), KNOWN_FORMATS)
