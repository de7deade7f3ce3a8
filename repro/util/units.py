"""Numbers as text with decimal units (GB = 1e9 bytes) and three significant digits; a missing value is an en dash."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

NO_VALUE = "–"
GB = 1e9
TERA = 1e12
_BYTES = (("TB", 1e12), ("GB", GB), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ps", 1e-12))
_FLOP = (("ZFLOP", 1e21), ("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
_PARAMETERS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))
_LONG = re.compile(r"\b\d{4,}\b( bytes)?")


def number(value: float | None, digits: int = 3) -> str:
    """Return `value` as text with `digits` significant digits, no exponent: `1.53`, `12,345`; `15` for exactly 15."""
    if value is None:
        return NO_VALUE
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    places = max(0, digits - 1 - exponent)
    text = f"{value:,.{places}f}"
    short = text.rstrip("0").rstrip(".") if "." in text else text
    return short if math.isclose(float(short.replace(",", "")), value, rel_tol=1e-9) else text


def size(count: float | None, digits: int = 3) -> str:
    """Return a number of bytes as text: `1.53 GB`, `512 B`."""
    return _scaled(count, _BYTES, digits)


def gb(count: float | None) -> str:
    """Return a number of bytes as text in GB, with two decimals and without the unit, for a column of a table."""
    return NO_VALUE if count is None else f"{count / GB:,.2f}"


def seconds(value: float | None, digits: int = 3) -> str:
    """Return a duration in seconds as text: `1.53 s`, `12.3 ms`, `2 min 5 s`."""
    if value is not None and value >= 100:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    return "0 s" if value == 0 else _scaled(value, _SECONDS, digits)


def parameter_count(count: float) -> str:
    """Return a number of parameters as text with four digits: `842`, `236.9K`, `1.558B`, `1.008T`."""
    return _scaled(count, _PARAMETERS, digits=4, space="")


def flop(count: float) -> str:
    """Return a number of floating-point operations as text: `1.53 PFLOP`."""
    return _scaled(count, _FLOP)


def flop_rate(per_s: float | None, digits: int = 3) -> str:
    """Return a rate of FLOP/s in TFLOP/s as text: `312 TFLOP/s`."""
    return NO_VALUE if per_s is None else f"{number(per_s / TERA, digits)} TFLOP/s"


def percent(part: float, *, sign: bool = False) -> str:
    """Return the fraction `part` as a percentage: `7.7 %`, or `+7.7 %` with `sign`."""
    return f"{100 * part:{'+' if sign else ''}.1f} %"


def ratio(value: float, low: float | None, high: float | None) -> str:
    """Return a ratio as text, with its confidence interval if both ends are known: `1.023 times (1.010 to 1.034)`."""
    span = f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else ""
    return f"{value:.3f} times{span}"


def interval(low: float | None, high: float | None) -> str:
    """Return a confidence interval as text: `[0.98, 1.04]`, or `no interval` if an end is unknown."""
    return "no interval" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def readable(message: str) -> str:
    """Return an allocator's error message with every number of bytes converted to a readable unit: `1.53 GB`."""
    return _LONG.sub(lambda found: size(int(found[0].split()[0])), message)


def common_unit(values: Iterable[float | None], unit: str) -> tuple[str, float]:
    """Return the name of a common unit for `values`, and the size of this unit in base units.

    In the common unit, the largest of `values` is 1 or more.  `unit`: base unit of `values`: `B`, `s` or `FLOP/s`.
    """
    known = {
        "B": _BYTES,
        "s": _SECONDS,
        "FLOP/s": tuple((f"{name}/s", size) for name, size in _FLOP if size <= TERA),
    }
    largest = max((value for value in values if value is not None), default=0.0)
    return next((each for each in known[unit] if largest >= each[1]), known[unit][-1])


def _scaled(
    value: float | None, units: tuple[tuple[str, float], ...], digits: int = 3, space: str = " "
) -> str:
    """Return `value` as text in the largest of `units` (in descending order) in which `value` rounds to 1 or more."""
    if value is None:
        return NO_VALUE
    least = 1 - 0.5 * 10.0**-digits
    unit, scale = next((each for each in units if abs(value) >= least * each[1]), units[-1])
    return f"{number(value / scale, digits)}{space}{unit}"
