"""The model's own error, from other reports: how far their published values lie outside of their intervals.

Split conformal prediction with the score of conformalized quantile regression (Romano, Patterson and Candes,
arXiv:1905.03222): by how much the logarithm of what was published lies outside of the interval that inputs leave, and
negative inside.  The margin of a row is the ceil((n + 1) 0.9)-th smallest of the scores of n rows, none of which cites
one of its reports or reads one of its runs.  That nine of ten are held is promised where rows are exchangeable; reports
differ, so `repro validate` counts how many are.  Nothing of it enters a prediction or a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

COVERAGE = 0.9


@dataclass(frozen=True)
class Residual:
    """How far off one row is."""

    kind: str
    """Rates and ratios have scores of their own."""
    reports: frozenset[str]
    """Keys of the sources that the row cites."""
    runs: frozenset[str]
    """Experiments that its prediction reads; two reports may print the same one."""
    score: float

    def apart(self, other: Residual) -> bool:
        """Whether the two have no report and no run in common."""
        return not (self.reports & other.reports or self.runs & other.runs)


def score(low: float, high: float, published: float) -> float:
    """By how much log(published) lies outside of log(low) to log(high)."""
    return max(log(low) - log(published), log(published) - log(high))


def margins(residuals: Sequence[Residual]) -> list[float | None]:
    """What the logarithm of each row's interval is widened by on either side, from all others that are apart from it.

    Never less than 0; None where these are too few to say it.
    """
    return [
        margin([other.score for other in residuals if other.kind == own.kind and own.apart(other)])
        for own in residuals
    ]


def margin(scores: Sequence[float]) -> float | None:
    """The conformal quantile of `scores`."""
    rank = ceil((len(scores) + 1) * COVERAGE)
    return max(0.0, sorted(scores)[rank - 1]) if rank <= len(scores) else None
