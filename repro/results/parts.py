"""Frozen dataclasses as JSON objects and back: the names of fields are the keys.

A field whose default is None is left out while it is None, and a key that is not there gives a field its default:
so lines that were written before a field existed are read, and are written again as they were.  Keys that no field
has are passed over.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

Convert = Callable[[Any], Any]
P = TypeVar("P", bound="Part")


class Part:
    """A base of frozen dataclasses that are a JSON object, or part of one."""

    @classmethod
    def read(cls: type[P], document: Mapping[str, Any]) -> P:
        """Of JSON data.  What has neither a key nor a default becomes None."""
        values = {}
        for name, key, convert, required in _plan(typing.cast(Any, cls)):
            if key in document:
                values[name] = convert(document[key])
            elif required:
                values[name] = None
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """JSON data; `read` is the way back."""
        document = {}
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                document[field.metadata.get("key", field.name)] = _plain(value)
        return document


def finite(value: Any) -> Any:
    """JSON data without NaN and infinity, which JSON has not: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


@lru_cache(maxsize=64)
def _plan(cls: type) -> tuple[tuple[str, str, Convert, bool], ...]:
    """Name, key and converter of each field of `cls`, and whether it has no default."""
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            field.metadata.get("key", field.name),
            _converter(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
        if field.init
    )


def _converter(hint: Any) -> Convert:
    """What makes a value of the type `hint` of JSON data: parts, and lists of them; an empty object is no part."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = _converter(next((one for one in arguments if one is not type(None)), Any))
        return inner if inner is _itself else lambda value: None if value in (None, {}) else inner(value)
    if isinstance(hint, type) and issubclass(hint, Part):
        return lambda value: hint.read(value) if isinstance(value, Mapping) else value
    if origin is list:
        inner = _converter(arguments[0])
        if inner is not _itself:
            return lambda value: [inner(entry) for entry in value] if isinstance(value, list) else value
    return _itself


def _itself(value: Any) -> Any:
    return value
