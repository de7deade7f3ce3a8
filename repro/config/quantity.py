"""Numbers of system files, each with its source and its range, and checks of these numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from repro.config.errors import ConfigError, require
from repro.config.files import read_toml


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Number in a system file with its source, and with a range if the number is uncertain."""

    value: float | None
    """Value of the number, or `"unknown"` (None in Python)."""
    source: str
    """Publication of the number, with "second-hand", "derived" or "unconfirmed", or why the number is unknown."""
    low: float | None = None
    """Minimum possible value of an uncertain input; `source` must contain `low: REASON`."""
    high: float | None = None
    """Maximum possible value of an uncertain input; `source` must contain `high: REASON`."""

    def __post_init__(self) -> None:
        require(self.value is None or self.value >= 0, "value", self.value, '0 or more, or "unknown"')
        right = "the publication of the number, or the reason why it is unknown"
        require(bool(self.source.strip()), "source", self.source, right)
        self._check_end("low", self.low)
        self._check_end("high", self.high)

    def _check_end(self, end: str, bound: float | None) -> None:
        """Raise `ConfigError` if `low` exceeds the value, `high` is below it, or `source` gives no reason for them."""
        if bound is None:
            return
        if self.value is None:
            raise ConfigError(end, bound, says="cannot be combined with an unknown value")
        lies = 0 <= bound <= self.value if end == "low" else bound >= self.value
        side = "in the range from 0 to" if end == "low" else "at least"
        require(lies, end, bound, f"{side} value = {self.value}")
        says = f'has no explanation: the key source must contain "{end}: REASON"'
        require(f"{end}: " in self.source, end, bound, says=says)

    @property
    def ranges(self) -> bool:
        """Return whether the number is uncertain, that is, has a minimum or a maximum in addition to its value."""
        return self.low is not None or self.high is not None

    @property
    def ends(self) -> tuple[float, ...]:
        """Return the number's minimum, best value and maximum; an empty tuple if the number is unknown."""
        if self.value is None:
            return ()
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, self.value, high

    def known(self, key: str, *, system: str = "") -> float:
        """Return the value of the number; if unknown, raise `ConfigError` with `key` and the reason."""
        if self.value is None:
            raise ConfigError(
                key, "unknown", says=f"this command needs a known value; source: {self.source}", file=system
            )
        return self.value

    def or_assumed(self, assumed: Quantity | None) -> Quantity:
        """Return this number if it is known, otherwise `assumed` with a source that begins with the word assumed.

        The result is unknown if `assumed` is None.
        """
        if self.value is not None or assumed is None:
            return self
        return replace(assumed, source=f"assumed, {assumed.source}: {self.source}")


UNSAID = Quantity(value=None, source="the file does not say")
"""Uncertain input, the default of optional keys of a system file."""
_ASSUMED = read_toml(Path(__file__).with_name("assumed.toml"))


def assumed_quantities(*path: str) -> dict[str, Quantity]:
    """Return the assumed numbers in the table `path` of assumed.toml, by key; empty if there is no such table."""
    table = _ASSUMED
    for name in path:
        table = table.get(name, {})
    return {key: Quantity(**numbers) for key, numbers in table.items()}


def check_positive(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` if a number of a system file or an end of its range is 0."""
    for value in (quantity.value, *quantity.ends):
        require(value != 0, key, value, 'more than 0, or "unknown"')


def check_fraction(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless a number of a system file and its range are more than 0 and at most 1."""
    for value in (quantity.value, *quantity.ends):
        require(value is None or 0 < value <= 1, key, value, 'more than 0 and at most 1, or "unknown"')


def check_whole(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless a number of a system file and the ends of its range are integers of at least 1."""
    for value in (quantity.value, *quantity.ends):
        require(value is None or value == int(value), key, value, 'an integer, or "unknown"')
    check_positive(key, quantity)
