"""Conversion of weights between this suite's GPT, Hugging Face, Megatron-LM and checkpoints of this suite.

`open_weights` detects the format of a folder. Ranks read only their part of the weights, and no code that a file names
is imported or called.
"""

from __future__ import annotations

from pathlib import Path

from repro.config import ConfigError, Model, require
from repro.engines.native.checkpoint import index
from repro.quality.weights import huggingface, megatron
from repro.quality.weights.source import RunCheckpoint, WeightSource

KNOWN_FORMATS = (
    "a folder of Hugging Face transformers (config.json), of Megatron-LM (latest_checkpointed_iteration.txt or "
    "mp_rank_00), or a checkpoint of `repro run` (index.json, or step-N/index.json)"
)


def open_weights(folder: Path, model: Model | None = None) -> WeightSource:
    """Return the model weights in `folder`, after a check of all tensor names and shapes.

    The elements of the tensors are read later, on demand.

    `model` gives the number of heads, which old checkpoints of Megatron-LM do not contain.
    """
    require(folder.is_dir(), "--weights", str(folder), KNOWN_FORMATS)
    if (folder / index.FILE).is_file():
        return RunCheckpoint(folder)
    if steps := index.complete(folder):
        return RunCheckpoint(index.folder_of(folder, steps[-1]))
    if (folder / huggingface.CONFIG_FILE).is_file():
        return huggingface.HuggingFaceFolder(folder)
    if (shards := megatron.find_rank_folders(folder)) is not None:
        return megatron.MegatronCheckpoint(shards, model)
    raise ConfigError("--weights", str(folder), KNOWN_FORMATS)
