"""Numbers of a system file, and the middle of many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from repro.measure.statistics import quantile


def quantity(value: float | None, source: str) -> dict[str, Any]:
    """A number beside its source, as in the files."""
    return {"value": "unknown" if value is None else rounded(value), "source": source}


def middle(values: Iterable[float]) -> float:
    """The median."""
    return quantile(list(values), 0.5)


def rounded(value: float) -> float:
    """Five digits, more than any of these measurements has."""
    return value if isinstance(value, int) else float(f"{value:.5g}")
