"""Which of two layouts is faster, as far as the numbers of the system are known.

Both are timed in the same cases (`repro.config.systems.unknowns`): with each unknown at an end of its range, and in
joint draws of all.  An unknown that slows both alike decides nothing, so it is their ratio, case by case, that tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from repro.results.interval import Sensitivity, StepInterval

Step = tuple[float, StepInterval]
"""Seconds at the best values, and what they may be instead."""
PART = 0.05
"""Of the joint draws: where the layout that comes later is faster in more of them, what is known does not say which
is; where it is in none of the rest either, the 90 % interval of the ratio is on one side of 1."""


@dataclass(frozen=True)
class Undecided:
    """A layout that may be faster than one which comes before it."""

    than: int
    """The place of the other one, from 1."""
    part: float
    """Of the joint draws, in which it is."""
    by: tuple[str, ...]
    """Unknowns that turn their order when they alone are at an end of their range, or else the one that comes nearest,
    the one that moves their ratio most first."""

    def as_dict(self) -> dict[str, Any]:
        """An entry of `undecided` in `repro plan --json`."""
        return {"than": self.than, "part": self.part, "by": list(self.by)}


def undecided(steps: Sequence[Step]) -> list[list[Undecided]]:
    """Of each of `steps`, best first, those before it that may be slower."""
    found = []
    for place, mine in enumerate(steps):
        beside = [
            Undecided(number, _part(mine, its), _by(mine, its)) for number, its in enumerate(steps[:place], 1)
        ]
        found.append([one for one in beside if one.part > PART])
    return found


def _part(mine: Step, its: Step) -> float:
    """Of the draws, in which `mine` is faster."""
    pairs = list(zip(mine[1].draws, its[1].draws, strict=True))
    return sum(one < other for one, other in pairs) / len(pairs)


def _by(mine: Step, its: Step) -> tuple[str, ...]:
    moves: list[Sensitivity] = [*mine[1].moves, *its[1].moves]
    ends = {move.key: [_ratio(mine, its, (move.key, end)) for end in (False, True)] for move in moves}
    order = sorted(ends, key=lambda key: -abs(log(ends[key][1] / ends[key][0])))
    turning = [key for key in order if min(ends[key]) < 1]
    return tuple(turning or order[:1])


def _ratio(mine: Step, its: Step, case: tuple[str, bool]) -> float:
    """Seconds of `mine` over those of `its` in one case."""
    return mine[1].at(case, mine[0]) / its[1].at(case, its[0])
