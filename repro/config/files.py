"""Reader of TOML files into frozen dataclasses; every mistake in a file raises a `ConfigError` of one line."""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from repro.config.errors import ConfigError, require, unknown_name_hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_NUMBERS = {"int": "an integer", "int | None": "an integer", "float": "a number", "float | None": "a number"}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.  Raises `ConfigError` if the file is missing or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ConfigError(
            error.strerror or "cannot be read", expected="the path of a TOML file", file=str(path)
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("not text", expected="a TOML file in UTF-8", file=str(path)) from None
    except ValueError as error:  # raised for a path with a null byte
        raise ConfigError(str(error), expected="the path of a TOML file", file=repr(str(path))) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not TOML", says=str(error), file=str(path)) from None
    except RecursionError:
        raise ConfigError("not TOML", says="tables or lists are nested too deeply", file=str(path)) from None


def check_writable(key: str, path: Path) -> None:
    """Raise `ConfigError` unless a file can be written at `path`; called before long work, and creates no file."""
    require(path.parent.is_dir(), key, str(path), "a file in an existing folder")
    try:
        with open(path, "ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be written ({error.strerror})") from None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the elements of a list and of the lists that it contains, or `value` itself if it is no list."""
    if isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Return pydantic's type adapter of the dataclass `cls`; cached, since its creation takes milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@cache
def _nested_types(cls: type[Any]) -> dict[str, Any]:
    """Return, by field name, the types of a dataclass's fields that are or contain dataclasses, without `| None`."""
    found = {}
    for name, kind in get_type_hints(cls).items():
        kinds = get_args(kind)
        if any(map(dataclasses.is_dataclass, (kind, *kinds))):
            found[name] = kinds[0] if type(None) in kinds else kind
    return found


def _build_nested(kind: Any, value: Any, *, file: str, where: str) -> Any:
    """Return the TOML tables at the key `where` as `kind`: a dataclass, or a dictionary or list of dataclasses."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(where, value, "a table", file=file)
        return {
            key: _build_nested(kinds[1], table, file=file, where=f"{where}.{key}")
            for key, table in value.items()
        }
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(where, value, f"tables [[{where}]]", file=file)
        return origin(
            _build_nested(kinds[0], table, file=file, where=f"{where} number {number}")
            for number, table in enumerate(value, 1)
        )
    return value if isinstance(value, kind) else build_dataclass(kind, value, file=file, where=where)


def build_dataclass(cls: type[T], data: Any, *, file: str = "", where: str = "") -> T:
    """Return a dataclass `cls` for a TOML table, whose types pydantic checks; invalid keys raise `ConfigError`.

    Inner tables become dataclasses, too. `"unknown"` becomes None if the type of the field is `float | None`.
    """
    from pydantic import ValidationError

    assert dataclasses.is_dataclass(cls)
    if not isinstance(data, dict):
        required = [
            f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING
        ]
        keys = f" {{ {' = ..., '.join(required)} = ... }}" if required else ""
        raise ConfigError(where or cls.__name__.lower(), data, f"a table{keys}", file=file)
    data = dict(data)
    for key, kind in _nested_types(cls).items():
        if key in data:
            data[key] = _build_nested(kind, data[key], file=file, where=f"{where}.{key}".lstrip("."))
    known = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key not in known:
            raise ConfigError(key, data[key], says=unknown_name_hint(key, known), file=file, where=where)
    for field in dataclasses.fields(cls):
        value = data.get(field.name)
        if value == "unknown" and field.type == "float | None":
            data[field.name] = value = None
        # pydantic would convert true to 1, "4" to 4, and "no" or 0 to false.
        if field.type in _NUMBERS and isinstance(value, (bool, str)):
            raise ConfigError(field.name, value, _NUMBERS[str(field.type)], file=file, where=where)
        kinds: Any = {"bool": bool, "bool | str": (bool, str)}.get(str(field.type), object)
        if field.name in data and not isinstance(value, kinds):
            raise ConfigError(field.name, value, "true or false", file=file, where=where)
        for leaf in _leaves(value):
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise ConfigError(field.name, value, "finite", file=file, where=where)
            if isinstance(leaf, bool) and isinstance(value, list):
                raise ConfigError(field.name, value, "a list of numbers or texts", file=file, where=where)
    try:
        return _adapter(cls).validate_python(data, strict=False)
    except ConfigError as error:
        raise error.within(file=file, where=where) from None
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause.within(file=file, where=where) from None
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ConfigError(key, says="is missing", file=file, where=where) from None
        right = first["msg"].lower().removeprefix("input should be ")
        if first["type"] == "enum":
            right = "one of " + first["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        raise ConfigError(key, first["input"], right, file=file, where=where) from None
