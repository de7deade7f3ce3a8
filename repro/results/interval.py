"""Uncertainty of a simulated step time, stored in records, due to numbers of the system that are known as a range."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, NamedTuple, TypeAlias

from repro.measure.statistics import quantile
from repro.results.json_fields import RecordPart

INTERVAL_QUANTILES = (0.05, 0.95)
"""Quantiles of the randomly drawn step times at the lower and the upper end of a 90 % interval."""


class Other(NamedTuple):
    """Choice in which one uncertain input of a system has a given value, and all others have their best values."""

    key: str
    value: float


Case: TypeAlias = int | tuple[str, bool] | Other
"""Choice of values for the uncertain inputs of a system: the number of a joint random draw, a pair, or `Other`.

A pair (key, high end) sets one input to an end of its range, `Other` to any value. Other inputs keep best estimates.
"""


def log_fraction(value: float, left: float, right: float) -> float:
    """Return the relative position of `value` between `left` (0) and `right` (1): logarithmic, linear if `left` = 0."""
    return log(value / left) / log(right / left) if left else value / right


def interpolate_log(left: float, right: float, part: float) -> float:
    """Return the value at the relative position `part` from `left` (0) to `right` (1): logarithmic, linear from 0."""
    return left * exp(part * log(right / left)) if left else part * right


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RecordPart):
    """Simulated step times over the range of one uncertain input, with all other inputs at their best values."""

    key: str
    """Key of the uncertain input in the system file, such as `links.inter-node.rings`."""
    low: float
    best: float
    high: float
    low_s: float
    high_s: float
    curve: list[list[float]] | None = None
    """Points [value of the uncertain input, step seconds] in and around its range; None if its effect is below 1 %."""

    def seconds_at(self, value: float) -> float:
        """Return the step time in seconds at a value of the uncertain input, by log-log interpolation of the curve."""
        points = self.curve or []
        after = min(max(bisect_left(points, [value]), 1), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return interpolate_log(low, high, log_fraction(min(max(value, left), right), left, right))

    @property
    def span(self) -> float:
        """Return the absolute difference of the step times at both ends of the uncertain input's range, in seconds."""
        return abs(self.high_s - self.low_s)


@dataclass(frozen=True, kw_only=True)
class StepInterval(RecordPart):
    """Simulated step times for many values of the uncertain inputs of a system, in seconds."""

    draws: list[float]
    """Step time of each joint random draw of all uncertain inputs. Draw i has the same quantiles in all records."""
    moves: list[Sensitivity]
    """Step times under variation of each single uncertain input, sorted by descending effect on the step time."""

    def summary(self, best: float) -> dict[str, Any]:
        """Return the interval of the step time, whose best value is `best`, and each input's effect as JSON data."""
        low, high = likely_range(self.draws, best)
        least, most = possible_range(self.cases(), best)
        moves = [{**replace(move, curve=None).as_dict(), "span": move.span / best} for move in self.moves]
        return {"low_s": low, "high_s": high, "least_s": least, "most_s": most, "moves": moves}

    def seconds_in(self, case: Case, best: float) -> float:
        """Return the step time in seconds for a choice of uncertain inputs; `best` if the choice has no effect."""
        if isinstance(case, int):
            return self.draws[case]
        key, end = case
        move = next((move for move in self.moves if move.key == key), None)
        if isinstance(case, Other):
            return best if move is None or not move.curve else move.seconds_at(case.value)
        return best if move is None else move.high_s if end else move.low_s

    def cases(self) -> Iterator[float]:
        """Yield the step times of all joint draws of uncertain inputs, and those at both ends of each input's range."""
        yield from self.draws
        for move in self.moves:
            yield from (move.low_s, move.high_s)


def likely_range(draws: Sequence[float], best: float) -> tuple[float, float]:
    """Return the 90 % interval of randomly drawn predictions, extended to include the best estimate `best`."""
    low, high = (quantile(draws, end) for end in INTERVAL_QUANTILES)
    return min(low, best), max(high, best)


def possible_range(cases: Iterable[float], best: float) -> tuple[float, float]:
    """Return minimum and maximum of the predictions for all choices of inputs, including the best estimate `best`."""
    found = [*cases, best]
    return min(found), max(found)
