"""The one exception for bad input: it says which file, key and value, and what would be right."""

from __future__ import annotations

from typing import Any

_UNSET: Any = object()


class ConfigError(ValueError):
    """Bad input from a person.  `str(error)` is one line; commands print it and exit with code 2.

    `key` and `value` name what was written, `expected` says what would be right.  Code that does
    not know the file leaves it out; whoever reads the file adds it with `within`.
    """

    def __init__(self, key: str, value: Any = _UNSET, expected: str = "", *, file: str = "", where: str = ""):
        self.key, self.value, self.expected, self.file, self.where = key, value, expected, file, where
        super().__init__(key, value, expected, file, where)

    def within(self, *, file: str = "", where: str = "") -> ConfigError:
        """The same error, placed in a file and in a table of that file."""
        return ConfigError(
            self.key,
            self.value,
            self.expected,
            file=self.file or file,
            where=".".join(part for part in (where, self.where) if part),
        )

    def __str__(self) -> str:
        key = ".".join(part for part in (self.where, self.key) if part)
        text = key if self.value is _UNSET else f"{key} = {self.value!r}"
        line = ": ".join(part for part in (self.file, text, self.expected) if part)
        return " ".join(line.split())


def require(condition: bool, key: str, value: Any, expected: str) -> None:
    """Raise `ConfigError` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, value, expected)
