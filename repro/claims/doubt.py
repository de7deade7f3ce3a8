"""What unknown inputs leave of a predicted value: its expression in every case of the records that it reads.

Both sides of a ratio are taken in the same case, so what they have in common cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.claims.expression import ExpressionError, evaluate
from repro.claims.formulas import CONSTANTS
from repro.claims.ledger import Evidence, Row
from repro.claims.records import Records
from repro.results.interval import Case, allowed, likely


@dataclass(frozen=True)
class Doubt:
    """The values of one expression in all cases, in base units."""

    low: float
    """With `high` the 90 % interval of joint draws, with the best value in it."""
    high: float
    least: float
    """With `most` all that is allowed."""
    most: float
    best: float
    alone: Mapping[str, tuple[float, float]]
    """By unknown, the values at the ends of its range, the one that moves the value most first."""

    def decided_by(self, meets: Callable[[float, float], bool]) -> str:
        """Which unknown brings the value to what was published, as `meets` says of a least and a most value."""
        for key, ends in self.alone.items():
            if meets(*allowed(ends, self.best)):
                return f"{key} decides"
        return f"no one alone, {' and '.join(list(self.alone)[:2])} most of all"


def doubted(
    evidence: Evidence,
    row: Row,
    experiments: Sequence[str],
    records: Records,
    functions: Mapping[str, Callable[..., Any]],
) -> Doubt | None:
    """What is left of the value of `evidence`, which reads `experiments`; None where nothing is in doubt."""
    found = records.intervals(experiments)
    draws = min((len(interval.draws) for interval in found), default=0)
    if not draws:
        return None
    variables = {**CONSTANTS, **row.variables}

    def value(case: Case | None) -> Any:
        moved = {**functions, **records.functions(evidence.kind, case)}
        return evaluate(evidence.value, moved, variables).value

    try:
        best, joint = value(None), [value(number) for number in range(draws)]
        if isinstance(best, str):
            return None
        keys = dict.fromkeys(move.key for interval in found for move in interval.moves)
        alone = {key: (value((key, False)), value((key, True))) for key in keys}
    except ExpressionError:  # of some case: a quotient of nothing
        return None
    alone = {key: ends for key, ends in alone.items() if set(ends) != {best}}
    if not alone:
        return None
    alone = dict(sorted(alone.items(), key=lambda item: -abs(item[1][1] - item[1][0])))
    ends = [end for pair in alone.values() for end in pair]
    return Doubt(*likely(joint, best), *allowed([*joint, *ends], best), best, alone)
