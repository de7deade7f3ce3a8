"""Seconds of one system, or of many at once: a float, or an array that has one for each, its lanes.

A schedule asks only what is later and what is longer, never which of two comes first, so that one pass through a step
times it for every lane exactly as a pass of its own would.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import ceil
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Lanes: TypeAlias = npt.NDArray[Any]
"""Seconds, [lanes]."""


def later(first: float, other: float) -> float:
    """The larger; of each lane."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.maximum(first, other))
    return other if other > first else first


def latest(several: Iterable[float]) -> float:
    """The largest; of each lane."""
    return reduce(later, several)


def earlier(first: float, other: float) -> float:
    """The smaller; of each lane."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.minimum(first, other))
    return min(first, other)


def whole(number: float) -> float:
    """Rounded up; in each lane."""
    return cast(float, np.ceil(number)) if isinstance(number, np.ndarray) else ceil(number)


def anywhere(condition: Any) -> bool:
    """Whether it holds; in any lane."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)
