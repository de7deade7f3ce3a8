"""Any weights that we read as a folder that transformers loads: `config.json` and safetensors, in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from repro.config import ConfigError
from repro.quality.weights import tensors_file
from repro.quality.weights.huggingface import CONFIG, family_for
from repro.quality.weights.rows import pieces
from repro.quality.weights.source import PADDED, Source
from repro.util import files

SHARD = 5_000_000_000
"""Bytes of a file, beyond which the weights are several: what transformers itself writes."""


def export(source: Source, folder: Path, vocab: int = 0, shard: int = SHARD) -> list[Path]:
    """Write the weights of `source` to `folder`; the files that were written.

    `vocab`: rows of the embedding that are kept, 0 for all; the others were padding.  Raises `ConfigError`.
    """
    model = source.model
    family = family_for(model)
    if family is None:
        other = ", ".join(f"{key} = {value}" for key, value in model.departures().items())
        says = f"is no family's of transformers that we write ({other or 'head_dim'})"
        raise ConfigError("--weights", model.name, says=says)
    vocab = vocab or model.vocab
    if not 0 < vocab <= model.vocab:
        raise ConfigError("--vocab", vocab, f"1 to {model.vocab}, the rows that there are")
    pairs = {
        pair.theirs if pair.theirs == family.head else family.prefix + pair.theirs: pair
        for pair in family.counterparts(model)
    }
    shapes = {name: list(pair.shape) for name, pair in pairs.items()}
    rows = {name: vocab for name, pair in pairs.items() if pair.stretches[0].ours in PADDED}
    for name in rows:
        shapes[name][0] = vocab
    groups = list(_groups(shapes, shard))
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"model{part}.safetensors"
        of_group = {name: shapes[name] for name in group}
        tensors_file.write(path, of_group, lambda name: pieces(source, pairs[name], rows.get(name, 0)))
        where |= dict.fromkeys(group, path.name)
        written.append(path)
    if len(groups) > 1:
        total = 4 * sum(map(math.prod, shapes.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        written.append(folder / "model.safetensors.index.json")
        files.write_file(written[-1], json.dumps(index, indent=2))
    written.append(folder / CONFIG)
    files.write_file(written[-1], json.dumps(family.document(model, vocab), indent=2))
    return written


def _groups(shapes: dict[str, list[int]], most: int) -> Iterator[list[str]]:
    """Names of the tensors of each file."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        more = 4 * math.prod(shape)
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group
