"""A folder of transformers: which family it is, and its tensors as our GPT's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.quality.weights import pickled, tensors_file
from repro.quality.weights.families import FAMILIES
from repro.quality.weights.family import Family
from repro.quality.weights.rows import StoredRows
from repro.quality.weights.source import TOKENS, compare, name_of

CONFIG = "config.json"


class HuggingFace(StoredRows):
    """A folder as `save_pretrained` writes it."""

    def __init__(self, folder: Path):
        files, found = _tensors(folder)
        config, path = _json(folder / CONFIG), folder / CONFIG
        family = family_of(config, path)
        try:
            model = family.model(config, name_of(folder))
        except ConfigError as error:
            raise error.within(file=str(path)) from None
        found = {name.removeprefix(family.prefix): tensor for name, tensor in found.items()}
        pairs = list(family.counterparts(model))
        copies = [name for name in found if family.passed_over.fullmatch(name)]
        copies += [family.head] if model.tied else []
        compare(str(folder), {pair.theirs: pair.shape for pair in pairs}, found, copies)
        self._head = (family.head, found.get(family.head)) if model.tied else ("", None)
        self._folder = folder
        super().__init__(f"Hugging Face {family.name}", model, files, pairs, found)

    def check(self) -> None:
        """The head is the embedding, if it is said to be."""
        name, head = self._head
        if head is not None and not torch.equal(head, self.stored[TOKENS][0][1]):
            right = "is another matrix than the token embedding, to which the configuration ties it"
            raise ConfigError(name, says=right, file=str(self._folder))


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a configuration.  Raises `ConfigError` for one that is not known."""
    kind = config.get("model_type", FAMILIES[0].types[0])
    for family in FAMILIES:
        if kind in family.types:
            return family
    known = ", ".join(family.types[0] for family in FAMILIES)
    raise ConfigError("model_type", kind, f"one of {known} (mistral is read as llama)", file=str(path))


def family_for(model: Model) -> Family | None:
    """The family that has a model's layer: what its configuration says is that model again."""
    for family in FAMILIES:
        try:
            again = family.model(family.document(model, model.vocab), model.name)
        except ConfigError:
            continue
        if _sizes(again) == _sizes(model):
            return family
    return None


def _sizes(model: Model) -> tuple[Any, ...]:
    sizes = (
        model.layers,
        model.hidden,
        model.heads,
        model.head_width,
        model.vocab,
        model.seq,
        model.ffn_width,
    )
    return (*sizes, model.departures())


def _tensors(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """The files with the weights, and all of their tensors; of both kinds that of safetensors."""
    for name, read in (("model.safetensors", tensors_file.read), ("pytorch_model.bin", pickled.load)):
        index = folder / f"{name}.index.json"
        if index.is_file():
            where = _json(index).get("weight_map")
            if not isinstance(where, Mapping):
                raise ConfigError("weight_map", says="is missing from the index", file=str(index))
            files = [folder / file for file in dict.fromkeys(map(str, where.values()))]
            # An index names files of its folder; another path is not followed.
            if strange := [path for path in files if path.parent != folder]:
                raise ConfigError("weight_map", str(strange[0]), "files of the same folder", file=str(index))
        elif (folder / name).is_file():
            files = [folder / name]
        else:
            continue
        found: dict[str, Tensor] = {}
        for path in files:
            content = read(path)
            if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
                raise ConfigError("weights", says="needs a table of tensors by name", file=str(path))
            found |= content
        return files, found
    right = "model.safetensors or pytorch_model.bin, or the index of their parts"
    raise ConfigError("weights", expected=right, file=str(folder))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or "cannot be read", file=str(path)) from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ConfigError("not JSON", says="needs a JSON object", file=str(path))
    return document
