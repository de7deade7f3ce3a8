"""Numbers as publications print them; the printed digits give their precision."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from repro.claims.expression import ExpressionError, Uncertain

UNITS: dict[str, float] = {
    "": 1,
    "x": 1,
    "%": 0.01,
    "parameters": 1,
    "elements": 1,
    "calls": 1,
    "samples": 1,
    "steps": 1,
    "GPUs": 1,
    "bytes": 1,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "MiB": 2**20,
    "GiB": 2**30,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "ms": 1e-3,
    "s": 1,
    "min": 60,
    "h": 3600,
    "days": 86400,
    "years": 365 * 86400,
    "TFLOP/s": 1e12,
    "PFLOP/s": 1e15,
    "EFLOP": 1e18,
    "PFLOP/s-days": 1e15 * 86400,
    "samples/s": 1,
    "tokens/s": 1,
    "FLOP/byte": 1,
}
"""Size of each published unit in the units of ledger expressions: bytes, seconds, FLOP or plain numbers."""
_MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)([KMBT]?)")


@dataclass(frozen=True)
class PrintedNumber:
    """A published number or range.  `step` is the value of one unit in the last printed digit."""

    text: str
    low: float
    """Published number, or the lower end of a published range such as `16-20B`."""
    high: float
    step: float

    @property
    def value(self) -> float:
        """Return the published number, or the middle of a published range."""
        return (self.low + self.high) / 2


def parse_printed_number(text: str) -> PrintedNumber:
    """Parse a number as printed: `"1.88"`, `"4,187"`, `"14.4B"`, `"0.5T"` or `"3-5"`. Raises `ValueError`."""
    parts = [part.strip() for part in re.split(r"(?<=[\dKMBT])\s*-\s*", text.strip())]
    matches = [_NUMBER.fullmatch(part) for part in parts]
    if len(parts) > 2 or not all(matches):
        raise ValueError(f"{text!r} is not a number such as 1.88, 4187, 14.4B or the range 3-5")
    found = [match for match in matches if match]
    last = found[-1].group(2)
    values = [float(match.group(1).replace(",", "")) * _MAGNITUDES[match.group(2) or last] for match in found]
    digits = max(len(match.group(1).partition(".")[2]) for match in found)
    if values[0] > values[-1]:
        raise ValueError(f"{text!r} is a range whose first number is the larger one")
    return PrintedNumber(text, values[0], values[-1], _MAGNITUDES[last] * 10.0**-digits)


def printed(text: str) -> Uncertain:
    """Return a printed number as an input of an expression, with the rounding of its last digit as uncertainty."""
    try:
        number = parse_printed_number(text)
    except (AttributeError, TypeError, ValueError):
        raise ExpressionError(
            f"printed({text!r}): must be a number in quotes, such as printed('39')"
        ) from None
    return Uncertain(number.value, number.low - number.step / 2, number.high + number.step / 2)


def digitised(value: float, error: float) -> Uncertain:
    """Return a number measured from a figure as an input of an expression, plus or minus `error`."""
    return Uncertain(value, value - error, value + error)


def magnitude(like: PrintedNumber | None) -> tuple[str, float]:
    """Return the magnitude letter of a printed number and its factor: `("B", 1e9)`; `("", 1)` without a letter."""
    letter = like.text[-1] if like is not None and like.text and like.text[-1] in "KMBT" else ""
    return letter, _MAGNITUDES[letter]


def format_value(value: float, like: PrintedNumber | None = None) -> str:
    """Format `value` in the magnitude of a published number, with four significant digits."""
    if math.isinf(value) or math.isnan(value):
        return str(value)
    letter, size = magnitude(like)
    if letter:
        return f"{format_value(value / size)}{letter}"
    if value == 0:
        return "0"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def append_unit(text: str, unit: str) -> str:
    """Append a unit to the text of a value, unless the text has the unit: `31.4 GB`, `44.8%`, `9.09x [8.7, 9.5]`."""
    if not unit or text.endswith(unit):
        return text
    value, bracket, interval = text.partition(" [")
    joined = f"{value}{unit}" if unit in ("x", "%") else f"{value} {unit}"
    return joined + bracket + interval
