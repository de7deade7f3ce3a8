"""Uncertainty of a simulated step time from unknown inputs of a system, as simulated records contain it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, NamedTuple, TypeAlias

from repro.measure.statistics import quantile
from repro.results.json_fields import RecordPart

INTERVAL_QUANTILES = (0.05, 0.95)
"""Quantiles of the joint draws at the ends of a 90 % interval."""


class Other(NamedTuple):
    """Case in which the unknown input `key` has `value`, and all other unknown inputs have their best values."""

    key: str
    value: float


Case: TypeAlias = int | tuple[str, bool] | Other
"""Choice of the unknown inputs: number of a joint draw; (key, whether it is at its high end) of one input; `Other`."""


def log_fraction(value: float, left: float, right: float) -> float:
    """Return the position of `value` from `left` (0) to `right` (1): on a log scale, or linear if `left` is 0."""
    return log(value / left) / log(right / left) if left else value / right


def interpolate_log(left: float, right: float, part: float) -> float:
    """Return the value at position `part` from `left` (0) to `right` (1), the inverse of `log_fraction`."""
    return left * exp(part * log(right / left)) if left else part * right


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RecordPart):
    """Simulated step times over the range of one unknown input, with all other inputs at their best values."""

    key: str
    """Key of the unknown input (`repro.config.systems.unknowns`)."""
    low: float
    best: float
    high: float
    low_s: float
    high_s: float
    curve: list[list[float]] | None = None
    """Points [value, step seconds] in and around the range, by value; None for an input with a small effect."""

    def seconds_at(self, value: float) -> float:
        """Return the step time, in seconds, at a value of the input by log-log interpolation of `curve`."""
        points = self.curve or []
        after = min(max(bisect_left(points, [value]), 1), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return interpolate_log(low, high, log_fraction(min(max(value, left), right), left, right))

    @property
    def span(self) -> float:
        """Return the absolute difference of the step times at both ends of the range, in seconds."""
        return abs(self.high_s - self.low_s)


@dataclass(frozen=True, kw_only=True)
class StepInterval(RecordPart):
    """Simulated step times for many values of the unknown inputs of a system, in seconds."""

    draws: list[float]
    """Step time of each joint draw. Draw i uses the same quantiles of the inputs in every record."""
    moves: list[Sensitivity]
    """Step times for each unknown input alone; largest effect first."""

    def summary(self, best: float) -> dict[str, Any]:
        """Return JSON data of the interval without curves; `best`: step time at the best values."""
        low, high = likely_range(self.draws, best)
        least, most = possible_range(self.cases(), best)
        moves = [{**replace(move, curve=None).as_dict(), "span": move.span / best} for move in self.moves]
        return {"low_s": low, "high_s": high, "least_s": least, "most_s": most, "moves": moves}

    def seconds_in(self, case: Case, best: float) -> float:
        """Return the step time in `case`, in seconds; `best` if the step does not depend on the input of the case."""
        if isinstance(case, int):
            return self.draws[case]
        key, end = case
        move = next((move for move in self.moves if move.key == key), None)
        if isinstance(case, Other):
            return best if move is None or not move.curve else move.seconds_at(case.value)
        return best if move is None else move.high_s if end else move.low_s

    def cases(self) -> Iterator[float]:
        """Yield the step times of all joint draws and of both ends of each input."""
        yield from self.draws
        for move in self.moves:
            yield from (move.low_s, move.high_s)


def likely_range(draws: Sequence[float], best: float) -> tuple[float, float]:
    """Return the 90 % interval of `draws`, extended to include `best`."""
    low, high = (quantile(draws, end) for end in INTERVAL_QUANTILES)
    return min(low, best), max(high, best)


def possible_range(cases: Iterable[float], best: float) -> tuple[float, float]:
    """Return the minimum and the maximum of all `cases` and `best`."""
    found = [*cases, best]
    return min(found), max(found)
