"""Numbers for people: decimal units, three significant digits, an en dash for what is not there."""

from __future__ import annotations

import math

NOTHING = "–"
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def size(count: float | None) -> str:
    """Bytes in decimal units: `1.53 GB`, `512 B`."""
    if count is None:
        return NOTHING
    for unit, scale in _BYTES:
        if abs(count) >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds: `1.53 s`, `12.3 ms`, `2 min 5 s`."""
    if value is None:
        return NOTHING
    if value >= 100:
        return f"{int(value // 60)} min {round(value % 60)} s"
    return f"{significant(value)} s" if value >= 1 else f"{significant(value * 1e3)} ms"


def count(value: float | None) -> str:
    """A number with thousands separators: `12,345`, `87.6`."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else significant(value)


def significant(value: float) -> str:
    """Three significant digits without an exponent: `1.53`, `15.3`, `153`, `0.00153`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def interval(low: float | None, high: float | None) -> str:
    """`[0.98, 1.04]`, or what is to be said where none can be given."""
    return "no interval" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
