"""What unknown inputs leave of a predicted value: its expression in every case of the records that it reads.

Both sides of a ratio are taken in the same case, so what they have in common cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.claims.expression import ExpressionError, evaluate
from repro.claims.formulas import CONSTANTS
from repro.claims.ledger import Evidence, Row
from repro.claims.records import Records
from repro.results.interval import Case, allowed, likely

LEAST = 0.02
"""Share of the doubt that an unknown has at least which is shown: less decides nothing."""


@dataclass(frozen=True)
class Doubt:
    """The values of one expression in all cases."""

    low: float
    """With `high` the 90 % interval of joint draws, with the best value in it."""
    high: float
    least: float
    """With `most` all that is allowed."""
    most: float
    best: float
    alone: Mapping[str, tuple[float, float]]
    """By unknown, the values at the ends of its range, the one that moves the value most first."""

    def over(self, size: float) -> Doubt:
        """Every value in units of `size`."""
        alone = {key: (low / size, high / size) for key, (low, high) in self.alone.items()}
        ends = {name: getattr(self, name) / size for name in ("low", "high", "least", "most", "best")}
        return replace(self, alone=alone, **ends)

    @property
    def shares(self) -> dict[str, float]:
        """By unknown, its part of how far all of them move the value, one at a time; together they are 1."""
        spans = {key: abs(high - low) for key, (low, high) in self.alone.items()}
        whole = sum(spans.values()) or 1.0
        return {key: span / whole for key, span in spans.items()}

    def largest(self, count: int) -> list[tuple[str, float, float, float]]:
        """(unknown, value at the low end of its range, at the high end, share) of the `count` that move it most."""
        shares = self.shares
        kept = [(key, *ends, shares[key]) for key, ends in self.alone.items() if shares[key] >= LEAST]
        return kept[:count]

    def deciding(self, meets: Callable[[float, float], bool]) -> tuple[str, ...]:
        """Which unknown alone brings the value to what was published, as `meets` says of a least and a most value;
        the two that move it most where none does."""
        for key, ends in self.alone.items():
            if meets(*allowed(ends, self.best)):
                return (key,)
        return tuple(list(self.alone)[:2])


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
