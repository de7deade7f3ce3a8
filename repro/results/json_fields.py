"""Conversion of frozen dataclasses to JSON objects and back, with field names as keys.

Fields that are None by default are not written if they are None. When reading, missing keys take the default of their
field, and unknown keys are ignored, so that records of older versions remain readable.
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
P = TypeVar("P", bound="RecordPart")


class RecordPart:
    """Base class of frozen dataclasses that represent a JSON object of a record."""

    @classmethod
    def read(cls: type[P], document: Mapping[str, Any]) -> P:
        """Return the dataclass instance that a JSON object describes, with None for missing keys without a default."""
        values = {}
        for field in _fields(typing.cast(Any, cls)):
            if field.key in document:
                values[field.name] = field.convert(document[field.key])
            elif field.required:
                values[field.name] = None
        return cls(**values)

    @classmethod
    def wrong(cls, document: Mapping[str, Any]) -> str:
        """Return an error for the first invalid key of a JSON object, else an empty string.

        The error is `KEY: missing` or `KEY: of another type`. Values of optional fields and containers are not checked.
        """
        for field in _fields(typing.cast(Any, cls)):
            if not field.types or not (field.required or field.key in document):
                continue
            if not isinstance(document.get(field.key), field.types):
                return f"{field.key}: {'missing' if field.key not in document else 'of another type'}"
            inner = field.part.wrong(document[field.key]) if field.part is not None else ""
            if inner:
                return f"{field.key}.{inner}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return the dataclass as JSON data, from which `read` restores an equal instance."""
        document = {}
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                document[field.metadata.get("key", field.name)] = _plain(value)
        return document


def finite(value: Any) -> Any:
    """Return JSON data with None in place of NaN and infinity, because JSON does not have these numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, RecordPart):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


class _Field(typing.NamedTuple):
    name: str
    key: str
    convert: Convert
    required: bool
    """Whether the dataclass field has no default value, so that its key must be in the JSON object."""
    types: tuple[type, ...]
    """Valid Python types of the field's JSON value; empty for a field that may be None, whose type is not checked."""
    part: type[RecordPart] | None


@lru_cache(maxsize=64)
def _fields(cls: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        if field.init:
            hint = hints[field.name]
            kind = typing.get_origin(hint) or hint
            part = kind if isinstance(kind, type) and issubclass(kind, RecordPart) else None
            no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            types = _TYPES.get(dict if part else kind, ())
            key = field.metadata.get("key", field.name)
            found.append(_Field(field.name, key, _converter(hint), no_default, types, part))
    return tuple(found)


_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (int, float),
    dict: (dict,),
    list: (list,),
}


def _converter(hint: Any) -> Convert:
    """Return the converter of JSON data to the type `hint`: record parts, lists of record parts, or data unchanged."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = _converter(next((one for one in arguments if one is not type(None)), Any))
        return inner if inner is _itself else lambda value: None if value in (None, {}) else inner(value)
    if isinstance(hint, type) and issubclass(hint, RecordPart):
        return lambda value: hint.read(value) if isinstance(value, Mapping) else value
    if origin is list:
        inner = _converter(arguments[0])
        if inner is not _itself:
            return lambda value: [inner(entry) for entry in value] if isinstance(value, list) else value
    return _itself


def _itself(value: Any) -> Any:
    return value
