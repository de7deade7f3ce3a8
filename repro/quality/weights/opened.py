"""Whose weights a folder holds, decided by what is in it."""

from __future__ import annotations

from pathlib import Path

from repro.config import ConfigError, Model
from repro.engines.native.checkpoint import index
from repro.quality.weights import huggingface, megatron
from repro.quality.weights.huggingface import HuggingFace
from repro.quality.weights.own import Own
from repro.quality.weights.source import Source

KNOWN = (
    "a folder of transformers (config.json), of Megatron-LM (latest_checkpointed_iteration.txt or mp_rank_00), "
    "or of a checkpoint of `repro run` (index.json, or step-N with one)"
)


def open_weights(folder: Path, model: Model | None = None) -> Source:
    """The weights in `folder`; `model` says what old checkpoints of Megatron-LM do not (their heads).

    Names and shapes are looked at, weights are not read.  Raises `ConfigError` in one line.
    """
    if not folder.is_dir():
        raise ConfigError("--weights", str(folder), KNOWN)
    if (folder / index.FILE).is_file():
        return Own(folder)
    if steps := index.complete(folder):
        return Own(index.folder_of(folder, steps[-1]))
    if (folder / huggingface.CONFIG).is_file():
        return HuggingFace(folder)
    if (shards := megatron.shards_of(folder)) is not None:
        return megatron.Megatron(shards, model)
    raise ConfigError("--weights", str(folder), KNOWN)
