"""How far a predicted step may be off, part of the record of a simulation.  Seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple, TypeAlias

from repro.measure.statistics import quantile
from repro.results.json_fields import RecordPart

ENDS = (0.05, 0.95)
"""Quantiles of the joint draws between which a 90 % interval lies."""


class Other(NamedTuple):
    """One unknown alone at some value, in its range or not, that its curve reaches."""

    key: str
    value: float


Case: TypeAlias = int | tuple[str, bool] | Other
"""The number of a joint draw; or the key of an unknown that is alone at an end of its range, True at the high one."""


def part_of(value: float, left: float, right: float) -> float:
    """How far `value` is on the way from `left` to `right`, by logarithms; from 0, which has none, by the values."""
    return log(value / left) / log(right / left) if left else value / right


def between(left: float, right: float, part: float) -> float:
    """What lies that `part` of the way, likewise."""
    return left * exp(part * log(right / left)) if left else part * right


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RecordPart):
    """One unknown number of a system and the step at both ends of its range, all others at their best values."""

    key: str
    """As `repro.config.systems.unknowns` has it."""
    low: float
    best: float
    high: float
    low_s: float
    high_s: float
    curve: list[list[float]] | None = None
    """[value, seconds] in the range and around it, by value; None where it moves the step by little."""

    def at(self, value: float) -> float:
        """Seconds of a step with another value, on straight lines between logarithms of the curve's points."""
        points = self.curve or []
        after = min(max(bisect_left(points, [value]), 1), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return between(low, high, part_of(min(max(value, left), right), left, right))

    @property
    def span(self) -> float:
        """Seconds between the two steps."""
        return abs(self.high_s - self.low_s)


@dataclass(frozen=True, kw_only=True)
class StepInterval(RecordPart):
    """The seconds of a step for other values of what is not known."""

    draws: list[float]
    """Joint ones; a number stands for the same values of the same unknowns in every record."""
    moves: list[Sensitivity]
    """Each unknown by itself, the one that moves the step most first."""

    def likely(self, best: float) -> tuple[float, float]:
        """The 90 % interval of a step that takes `best` at the best values, which lies in it."""
        return likely(self.draws, best)

    def allowed(self, best: float) -> tuple[float, float]:
        """The least and the most in any case."""
        return allowed(self.cases(), best)

    def summary(self, best: float) -> dict[str, Any]:
        """Plain data, of a step that takes `best` at the best values."""
        low, high = self.likely(best)
        least, most = self.allowed(best)
        moves = [{**move.as_dict(), "span": move.span / best} for move in self.moves]
        return {"low_s": low, "high_s": high, "least_s": least, "most_s": most, "moves": moves}

    def at(self, case: Case, best: float) -> float:
        """The seconds in `case`."""
        if isinstance(case, int):
            return self.draws[case]
        key, end = case
        move = next((move for move in self.moves if move.key == key), None)
        if isinstance(case, Other):
            return best if move is None or not move.curve else move.at(case.value)
        return best if move is None else move.high_s if end else move.low_s

    def cases(self) -> Iterator[float]:
        """The seconds of every case."""
        yield from self.draws
        for move in self.moves:
            yield from (move.low_s, move.high_s)


def likely(draws: Sequence[float], best: float) -> tuple[float, float]:
    """The 90 % interval of a value with these `draws`, `best` in it."""
    low, high = (quantile(draws, end) for end in ENDS)
    return min(low, best), max(high, best)


def allowed(cases: Iterable[float], best: float) -> tuple[float, float]:
    """The least and the most of all `cases` and `best`."""
    found = [*cases, best]
    return min(found), max(found)
