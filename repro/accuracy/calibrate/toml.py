"""Plain tables as TOML text: what the standard library reads and does not write."""

from __future__ import annotations

import json
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def text(tables: dict[str, Any]) -> str:
    """`tables` as a TOML document: a table of numbers beside their sources on one line each, others by header."""
    return "\n".join(_table(tables, ())).strip("\n") + "\n"


def _table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _is_table(value)]
    if lines and path:
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for key, value in table.items():
        if _is_table(value):
            lines += _table(value, (*path, key))
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and "source" not in value


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
