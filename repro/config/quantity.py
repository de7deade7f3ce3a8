"""A number and where it comes from: what system files are made of."""

from __future__ import annotations

from dataclasses import dataclass

from repro.config.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number and where it comes from."""

    value: float | None
    """None where it is not known; files write `"unknown"`."""
    source: str
    """Who published it ("second-hand", "derived", "unconfirmed" where that is so), or why it is unknown."""

    def __post_init__(self) -> None:
        require(self.value is None or self.value >= 0, "value", self.value, '0 or more, or "unknown"')
        require(
            bool(self.source.strip()),
            "source",
            self.source,
            "where the number comes from, or why it is unknown",
        )

    def known(self, key: str, *, system: str = "") -> float:
        """The number; `ConfigError` that names `key` and the reason if it is unknown."""
        if self.value is None:
            raise ConfigError(key, "unknown", says=f"is needed here, but {self.source}", file=system)
        return self.value

    def or_assumed(self, assumed: tuple[float, str] | None) -> Quantity:
        """Itself where it is known, else the value `assumed` for that reason, with a source that says so.

        With nothing to assume it stays unknown.
        """
        if self.value is not None or assumed is None:
            return self
        value, reason = assumed
        return Quantity(value=value, source=f"assumed, {reason}: {self.source}")


UNSAID = Quantity(value=None, source="the file does not say")
"""An optional key that a file leaves out."""


def check_positive(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` if the number is 0."""
    require(quantity.value != 0, key, quantity.value, 'more than 0, or "unknown"')


def check_fraction(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless the number is a part of something: more than 0 and at most 1."""
    value = quantity.value
    require(value is None or 0 < value <= 1, key, value, 'more than 0 and at most 1, or "unknown"')


def check_whole(key: str, quantity: Quantity) -> None:
    """Raise `ConfigError` unless the number counts something: 1, 2, ..."""
    value = quantity.value
    require(value is None or value == int(value), key, value, 'a whole number, or "unknown"')
    check_positive(key, quantity)
