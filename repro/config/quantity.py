"""A number with its source: the element of system files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from repro.config.errors import ConfigError, require
from repro.config.files import read_toml


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number with its source."""

    value: float | None
    """Value; None if unknown, which files write as `"unknown"`."""
    source: str
    """Publication ("second-hand", "derived" or "unconfirmed" if that applies), or the reason for an unknown number."""
    low: float | None = None
    """Minimum possible value, if sources disagree or bound it; `source` gives `low: REASON`."""
    high: float | None = None
    """Maximum possible value; `source` gives `high: REASON`."""

    def __post_init__(self) -> None:
        require(self.value is None or self.value >= 0, "value", self.value, '0 or more, or "unknown"')
        require(
            bool(self.source.strip()),
            "source",
            self.source,
            "where the number comes from, or why it is unknown",
        )
        self._check_end("low", self.low)
        self._check_end("high", self.high)

    def _check_end(self, end: str, bound: float | None) -> None:
        """Raise `ConfigError` unless this end of the range is on its side of the value and has a reason."""
        if bound is None:
            return
        if self.value is None:
            raise ConfigError(end, bound, says="needs a value: what is unknown has no range")
        lies = 0 <= bound <= self.value if end == "low" else bound >= self.value
        side = "0 or more and at most" if end == "low" else "at least"
        require(lies, end, bound, f"{side} value = {self.value}")
        require(f"{end}: " in self.source, end, bound, says=f'has no reason: source must say "{end}: ..."')

    @property
    def ranges(self) -> bool:
        """Return whether other values are as possible as `value`."""
        return self.low is not None or self.high is not None

    @property
    def ends(self) -> tuple[float, ...]:
        """Return the minimum, the best and the maximum value; empty if unknown."""
        if self.value is None:
            return ()
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, self.value, high

    def known(self, key: str, *, system: str = "") -> float:
        """Return the number.  Raises `ConfigError` that names `key` and the reason if it is unknown."""
        if self.value is None:
            raise ConfigError(key, "unknown", says=f"is needed here, but {self.source}", file=system)
        return self.value

    def or_assumed(self, assumed: Quantity | None) -> Quantity:
        """Return the quantity if it is known, otherwise the `assumed` one, whose source is marked as assumed.

        Without an assumed quantity, the result is unknown.
        """
        if self.value is not None or assumed is None:
            return self
        return replace(assumed, source=f"assumed, {assumed.source}: {self.source}")


UNSAID = Quantity(value=None, source="the file does not say")
"""Optional key that a file omits."""
_ASSUMED = read_toml(Path(__file__).with_name("assumed.toml"))


def assumed_quantities(*path: str) -> dict[str, Quantity]:
    """Return the quantities of the table at `path` of `assumed.toml` by key; empty without this table."""
    table = _ASSUMED
    for name in path:
        table = table.get(name, {})
    return {key: Quantity(**numbers) for key, numbers in table.items()}


def check_positive(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` if the number is 0."""
    for value in (quantity.value, *quantity.ends):
        require(value != 0, key, value, 'more than 0, or "unknown"')


def check_fraction(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless the number is a fraction: more than 0 and at most 1."""
    for value in (quantity.value, *quantity.ends):
        require(value is None or 0 < value <= 1, key, value, 'more than 0 and at most 1, or "unknown"')


def check_whole(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless the number is a count: 1, 2, ..."""
    for value in (quantity.value, *quantity.ends):
        require(value is None or value == int(value), key, value, 'a whole number, or "unknown"')
    check_positive(key, quantity)
