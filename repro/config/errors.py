"""Exception for invalid input, whose message names the file, the key, the value and the valid values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

_UNSET: Any = object()


class ConfigError(ValueError):
    """Error in a user's input. `str(error)` is one line, which commands print before they exit with code 2.

    `key` and `value` name the input, and `expected` describes valid input (`KEY = VALUE: must be EXPECTED`). `says`
    replaces the text from `must be` on. Code that does not know the name of the file omits it, and the reader of the
    file adds it (`within`).
    """

    def __init__(
        self,
        key: str,
        value: Any = _UNSET,
        expected: str = "",
        *,
        says: str = "",
        file: str = "",
        where: str = "",
    ):
        self.key, self.value, self.file, self.where = key, value, file, where
        self.expected, self.says = expected, says
        super().__init__(key, value, expected, says, file, where)

    def within(self, *, file: str = "", where: str = "") -> ConfigError:
        """Return a copy of the error whose message also names the file and an outer TOML table, `where`."""
        where = ".".join(part for part in (where, self.where) if part)
        return self.for_key(self.key, file=self.file or file, where=where)

    def for_key(self, key: str, *, file: str = "", where: str = "") -> ConfigError:
        """Return a copy of the error whose message names the given key, file and TOML table, not the original ones."""
        return ConfigError(key, self.value, self.expected, says=self.says, file=file, where=where)

    def __str__(self) -> str:
        key = ".".join(part for part in (self.where, self.key) if part)
        value = str(self.value).lower() if isinstance(self.value, bool) else short(repr(self.value))
        text = short(key) if self.value is _UNSET else f"{short(key)} = {value}"
        right = self.says or (f"must be {self.expected}" if self.expected else "")
        line = ": ".join(part for part in (short(self.file, 300), text, right) if part)
        return " ".join(line.split())


def short(text: str, most: int = 120) -> str:
    """Return `text` without its middle if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def require(
    condition: object,
    key: str,
    value: Any = _UNSET,
    expected: str = "",
    *,
    says: str = "",
    file: str = "",
    where: str = "",
) -> None:
    """Raise a `ConfigError` built from the other arguments unless `condition` is true."""
    if not condition:
        raise ConfigError(key, value, expected, says=says, file=file, where=where)


def unknown_name_hint(key: str, known: Sequence[str], what: str = "key") -> str:
    """Return an error message for a name that is not among `known`, with the most similar name or all known names."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"known are {listed(known)}"
        if known
        else f"no other {what} is defined"
    )
    return f"unknown {what}; {hint}"


def listed(names: Sequence[str], most: int = 30) -> str:
    """Return a text with the first `most` names and the number of omitted names, for an error message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
