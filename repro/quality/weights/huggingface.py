"""Import and export of folders in the format of Hugging Face transformers: `config.json` and files of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.engines.native.checkpoint.files import write_safetensors
from repro.quality.weights.families import FAMILIES
from repro.quality.weights.family import Family
from repro.quality.weights.source import (
    TOKEN_EMBEDDING,
    VOCAB_PARAMETERS,
    StoredRows,
    WeightSource,
    check_tensors,
    name_from_folder,
)
from repro.quality.weights.tensor_files import read_safetensors, read_torch_file
from repro.util.files import write_file

CONFIG_FILE = "config.json"
SIZES = ("layers", "hidden", "heads", "head_width", "vocab", "seq", "ffn_width")
MAX_SHARD_BYTES = 5_000_000_000
"""Maximum size of an exported weight file in bytes; equal to the default of transformers."""


class HuggingFaceFolder(StoredRows):
    """Model weights in a folder that `save_pretrained` of Hugging Face transformers wrote."""

    def __init__(self, folder: Path):
        files, found = _read_tensors(folder)
        path = folder / CONFIG_FILE
        config = _read_json(path)
        family = _family_of_config(config, path)
        try:
            model = family.model(config, name_from_folder(folder))
        except ConfigError as error:
            raise error.within(file=str(path)) from None
        found = {name.removeprefix(family.prefix): tensor for name, tensor in found.items()}
        pairs = list(family.counterparts(model))
        ignored = [name for name in found if family.ignored.fullmatch(name)]
        ignored += [family.head] if model.tied else []
        check_tensors(str(folder), {pair.theirs: pair.shape for pair in pairs}, found, ignored)
        self._head = (family.head, found.get(family.head)) if model.tied else ("", None)
        self._folder = folder
        super().__init__(f"Hugging Face {family.name}", model, files, pairs, found)

    def check(self) -> None:
        """Raise `ConfigError` if a tied model has an output matrix that differs from the embedding."""
        name, head = self._head
        if head is not None and not torch.equal(head, self.stored[TOKEN_EMBEDDING][0][1]):
            right = "output matrix differs from the token embedding, although the configuration ties the two matrices"
            raise ConfigError(name, says=right, file=str(self._folder))


def _family_of_config(config: Mapping[str, Any], path: Path) -> Family:
    """Return the model family of a configuration by its `model_type`; raise `ConfigError` for an unknown type."""
    kind = config.get("model_type", FAMILIES[0].types[0])
    for family in FAMILIES:
        if kind in family.types:
            return family
    known = ", ".join(family.types[0] for family in FAMILIES)
    raise ConfigError("model_type", kind, f"one of {known} (mistral is read as llama)", file=str(path))


def family_of_model(model: Model) -> Family | None:
    """Return the first family whose configuration can represent the model, or None."""
    for family in FAMILIES:
        try:
            again = family.model(family.document(model, model.vocab), model.name)
        except ConfigError:
            continue
        same_sizes = all(getattr(again, size) == getattr(model, size) for size in SIZES)
        if same_sizes and again.departures() == model.departures():
            return family
    return None


def _read_tensors(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """Return the weight files of a folder and all their tensors; safetensors take precedence over torch's files."""
    for name, read in (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_torch_file)):
        index = folder / f"{name}.index.json"
        if index.is_file():
            where = _read_json(index).get("weight_map")
            if not isinstance(where, Mapping):
                raise ConfigError("weight_map", says="is missing from the index file", file=str(index))
            files = [folder / file for file in dict.fromkeys(map(str, where.values()))]
            # A weight index from an untrusted source must not make this program open files of other folders.
            if outside := [path for path in files if path.parent != folder]:
                right = "a file in the folder of the index file"
                raise ConfigError("weight_map", str(outside[0]), right, file=str(index))
        elif (folder / name).is_file():
            files = [folder / name]
        else:
            continue
        found: dict[str, Tensor] = {}
        for path in files:
            content = read(path)
            if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
                raise ConfigError("weights", says="must be a dictionary of tensors by name", file=str(path))
            found |= content
        return files, found
    right = "in model.safetensors or pytorch_model.bin, or in files that model.safetensors.index.json names"
    raise ConfigError("weights", expected=right, file=str(folder))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or "cannot be read", file=str(path)) from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ConfigError("not JSON", says="the file must contain a JSON object", file=str(path))
    return document


def export_huggingface(
    source: WeightSource, folder: Path, vocab: int = 0, shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Write the weights of `source` to `folder` in fp32, and return the paths of the written files.

    `vocab` is the number of tokens without padding; 0 writes padding, too. Unsupported models raise `ConfigError`.
    """
    model = source.model
    family = family_of_model(model)
    if family is None:
        other = ", ".join(f"{key} = {value}" for key, value in model.departures().items())
        says = f"no supported model family of transformers has layers with {other or 'this head_dim'}"
        raise ConfigError("--weights", model.name, says=says)
    vocab = vocab or model.vocab
    if not 0 < vocab <= model.vocab:
        raise ConfigError("--vocab", vocab, f"1 to {model.vocab}, the number of rows of the token embedding")
    pairs = {
        pair.theirs if pair.theirs == family.head else family.prefix + pair.theirs: pair
        for pair in family.counterparts(model)
    }
    shapes = {name: list(pair.shape) for name, pair in pairs.items()}
    rows = {name: vocab for name, pair in pairs.items() if pair.row_ranges[0].ours in VOCAB_PARAMETERS}
    for name in rows:
        shapes[name][0] = vocab
    groups = list(_group_by_file(shapes, shard_bytes))
    read: Callable[[str], Iterator[Tensor]] = lambda name: pairs[name].read_slices(source, rows.get(name, 0))
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"model{part}.safetensors"
        write_safetensors(path, {name: shapes[name] for name in group}, read, {"format": "pt"})
        where |= dict.fromkeys(group, path.name)
        written.append(path)
    if len(groups) > 1:
        total = 4 * sum(map(math.prod, shapes.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        written.append(folder / "model.safetensors.index.json")
        write_file(written[-1], json.dumps(index, indent=2))
    written.append(folder / CONFIG_FILE)
    write_file(written[-1], json.dumps(family.document(model, vocab), indent=2))
    return written


def _group_by_file(shapes: dict[str, list[int]], max_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors that each exported file contains, in fp32 up to `max_bytes` per file."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        tensor_bytes = 4 * math.prod(shape)
        if group and size + tensor_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor_bytes
    yield group
