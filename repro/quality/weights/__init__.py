"""Conversion of weights between the suite's GPT, Hugging Face, Megatron-LM and checkpoints of the suite.

Every format is a `source` of parameter elements on demand, so a rank reads only its part. `open_weights` detects the
format of a folder, and no code named in a file is imported or called.
"""

from __future__ import annotations

from pathlib import Path

from repro.config import ConfigError, Model
from repro.engines.native.checkpoint import index
from repro.quality.weights import huggingface, megatron
from repro.quality.weights.source import RunCheckpoint, WeightSource

KNOWN_FORMATS = (
    "a folder of transformers (config.json), of Megatron-LM (latest_checkpointed_iteration.txt or mp_rank_00), "
    "or of a checkpoint of `repro run` (index.json, or step-N with one)"
)


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
