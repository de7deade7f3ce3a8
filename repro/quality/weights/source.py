"""Weights on disk as a rank asks for them: flat fp32 elements of its tensor-parallel part of one parameter.

Files are mapped, not read, so that a rank takes from them what it keeps: under stage 3 its rows, under tensor
parallelism its heads.  (A matrix that lies transposed in its file is read in strides.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import ConfigError, Layout, Model, Training
from repro.model.gpt import GPT
from repro.model.layer import KEYS_AND_VALUES
from repro.parallel import mesh as meshes
from repro.parallel.zero.flat_parameters import InitialValues

TOKENS = "embed.tokens"
PADDED = (TOKENS, "head.output")
"""Whose rows are tokens, of which there may be more than a file has: padding."""


class Place(NamedTuple):
    """A parameter of the whole model: its shape, and the dimension along which tp splits it."""

    shape: tuple[int, ...]
    split: int | None


def parameters(model: Model) -> dict[str, Place]:
    """Every parameter of our GPT by its name."""
    whole = GPT(model, Layout(), Training(), meshes.single_rank_mesh().tp)
    return {name: Place(tuple(p.shape), vars(p)["split"]) for name, p in whole.named_parameters()}


class Source(ABC):
    """The weights of one folder."""

    kind: str
    """Whose layout it is, for a person."""
    model: Model
    files: tuple[Path, ...]
    """With the weights; not those that describe them."""

    @cached_property
    def places(self) -> dict[str, Place]:
        """Of the parameters that it has."""
        return parameters(self.model)

    @abstractmethod
    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        """Elements start..stop, flat fp32, of the part that tp rank `rank` of `ranks` has of a parameter.

        `rows`: those of a token embedding that is padded, beyond which there are zeros; 0: as many as it has.
        """

    def check(self) -> None:
        """Raise `ConfigError` where copies of one parameter differ; it reads them."""
        return

    def values(self, names: Sequence[str], rank: int, ranks: int, vocab: int) -> InitialValues:
        """What fills a rank's parameters of these `names`; the vocabulary is padded to `vocab`."""
        replicated = KEYS_AND_VALUES if ranks > self.model.key_heads else ()

        def read(i: int, start: int, stop: int) -> Tensor:
            rows = vocab if names[i] in PADDED else 0
            if names[i].endswith(replicated):
                return self.elements(names[i], start, stop)
            return self.elements(names[i], start, stop, rank, ranks, rows)

        return read


@dataclass(frozen=True)
class Stored:
    """A parameter as files have it: views in our orientation, which follow each other along `dim`.

    Dimensions after the one that tp splits may be more than the parameter has: [3, heads, width, h] for [3, inner, h].
    """

    parts: tuple[Tensor, ...]
    dim: int = 0

    @property
    def shape(self) -> list[int]:
        """Of all parts together."""
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return shape

    def narrow(self, dim: int, first: int, last: int) -> Stored:
        """first..last along `dim`, or what there is of them; nothing is copied."""
        if dim != self.dim:
            return Stored(tuple(part.narrow(dim, first, last - first) for part in self.parts), self.dim)
        found, begin = [], 0
        for part in self.parts:
            low, high = max(first, begin), min(last, begin + part.shape[dim])
            if low < high:
                found.append(part.narrow(dim, low - begin, high - low))
            begin += part.shape[dim]
        return Stored(tuple(found) or (self.parts[0].narrow(dim, 0, 0),), self.dim)


class StoredTensors(Source):
    """Weights whose files are mapped as tensors."""

    def __init__(self, kind: str, model: Model, files: Iterable[Path], stored: Mapping[str, Stored]):
        self.kind, self.model, self.files, self.stored = kind, model, tuple(files), stored

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        stored, split = self.stored[name], self.places[name].split
        shape = stored.shape
        if rows:
            shape[0] = rows
        if split is not None:
            shape[split] //= ranks
            stored = stored.narrow(split, rank * shape[split], (rank + 1) * shape[split])
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        stored = stored.narrow(0, first, last)
        block = stored.parts[0] if len(stored.parts) == 1 else torch.cat(stored.parts, stored.dim)
        found = block.reshape(-1)[start - first * row : stop - first * row].float()
        missing = stop - start - found.numel()
        return torch.nn.functional.pad(found, (0, missing)) if missing else found


def name_of(path: Path) -> str:
    """A model's name made of its folder's."""
    return path.resolve().name.lstrip(".-").strip() or "weights"


def compare(
    what: str, expected: Mapping[str, Sequence[int]], found: Mapping[str, Tensor], ignored: Iterable[str] = ()
) -> None:
    """Raise `ConfigError` about `what` unless `found` has the names and shapes that are expected, and no others."""
    faults = []
    missing = [name for name in expected if name not in found]
    unexpected = sorted(found.keys() - expected.keys() - set(ignored))
    wrong = [
        f"{name} is {list(found[name].shape)} where {list(shape)} is right"
        for name, shape in expected.items()
        if name in found and list(found[name].shape) != list(shape)
    ]
    for words, names in (("lacks", missing), ("has what our GPT has not:", unexpected), ("", wrong)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            faults.append(f"{words} {names[0]}{more}".strip())
    if faults:
        raise ConfigError("weights", says="; ".join(faults), file=what)
