"""Any weights that we read as a folder that transformers loads: `config.json` and safetensors, in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from repro.checkpoint.files import SLICE
from repro.config import ConfigError
from repro.host import files
from repro.weights import tensors_file
from repro.weights.huggingface import CONFIG, Counterpart, configuration, counterparts
from repro.weights.source import TOKENS, Source

SHARD = 5_000_000_000
"""Bytes of a file, beyond which the weights are several: what transformers itself writes."""


def export(source: Source, folder: Path, vocab: int = 0, shard: int = SHARD) -> list[Path]:
    """Write the weights of `source` to `folder`; the files that were written.

    `vocab`: rows of the embedding that are kept, 0 for all; the others were padding.  Raises `ConfigError`.
    """
    model = source.model
    if model.heads * model.head_width != model.hidden:
        right = f"heads * head_dim = hidden; here {model.heads} x {model.head_width} and {model.hidden}"
        raise ConfigError("--weights", model.name, says=f"cannot be GPT-2's, which has {right}")
    vocab = vocab or model.vocab
    if not 0 < vocab <= model.vocab:
        raise ConfigError("--vocab", vocab, f"1 to {model.vocab}, the rows that there are")
    pairs = {pair.theirs: pair for pair in counterparts(model)}
    shapes = {f"transformer.{name}": list(pair.shape) for name, pair in pairs.items()}
    shapes["transformer.wte.weight"][0] = vocab
    groups = list(_groups(shapes, shard))
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"model{part}.safetensors"
        of_group = {name: shapes[name] for name in group}
        tensors_file.write(path, of_group, lambda name: _pieces(source, pairs[_bare(name)], shapes[name]))
        where |= dict.fromkeys(group, path.name)
        written.append(path)
    if len(groups) > 1:
        total = 4 * sum(map(math.prod, shapes.values()))
        index = {"metadata": {"total_size": total}, "weight_map": where}
        written.append(folder / "model.safetensors.index.json")
        files.write(written[-1], json.dumps(index, indent=2))
    written.append(folder / CONFIG)
    files.write(written[-1], json.dumps(configuration(model, vocab), indent=2))
    return written


def _bare(name: str) -> str:
    return name.removeprefix("transformer.")


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


def _pieces(source: Source, pair: Counterpart, shape: list[int]) -> Iterator[Tensor]:
    """The elements of one of their tensors in their order; the embedding, the largest by far, in slices."""
    total = math.prod(shape)
    if pair.matrix:
        inputs, outputs = shape
        yield source.elements(pair.ours, 0, total).view(outputs, inputs).t()
        return
    step = SLICE if pair.ours == TOKENS else total
    for start in range(0, total, step):
        yield source.elements(pair.ours, start, min(start + step, total))
