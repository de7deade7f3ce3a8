"""The tensors that modules pass each other, in whatever they are wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any, attributes: bool = False) -> Iterator[Tensor]:
    """Tensors in `value`: in what torch's trees know (tuples, lists, dicts), and in dataclasses and other mappings.

    `attributes`: and in those of any object, as in what a module returns.  What a module is given may be an object
    that carries tensors past it, of which nobody can tell when it is done with them.
    """
    return _tensors_in(value, attributes, set())


def _tensors_in(value: Any, attributes: bool, seen: set[int]) -> Iterator[Tensor]:
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
            continue
        inner: list[Any] = []
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, field.name) for field in fields(leaf)]
        elif attributes and hasattr(leaf, "__dict__") and not callable(leaf):
            inner = list(vars(leaf).values())
        if inner and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors_in(inner, attributes, seen)
