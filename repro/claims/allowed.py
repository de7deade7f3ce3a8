"""The rule of `repro.claims.tolerance` applied to one piece of evidence for one row, and said in words.

Nothing here needs a record: what would be accepted is known before anything is run.
"""

from __future__ import annotations

from repro.claims.ledger import Claim, Evidence, Row
from repro.claims.published import UNITS, Printed, magnitude
from repro.claims.tolerance import COUNTED, Accepted, accepted, room


def allowed(row: Row, evidence: Evidence, claim: Claim) -> Accepted | None:
    """The values, in the row's unit, that agree with what was published.

    None where the published number is not what the value is compared with: at a twin's scale, or words.
    """
    if evidence.expect is not None or row.printed is None:
        return None
    return accepted(
        row.printed,
        evidence.metric,
        closed_form=evidence.kind == "analytic",
        bound=row.bound,
        error=row.error,
        steps=tuple(step / UNITS[row.unit] for step in claim.steps),
        count=row.unit in COUNTED and not magnitude(row.printed)[0],
    )


def stated(row: Row, claim: Claim) -> Accepted | None:
    """The published value itself, in the row's unit, with the source's own error and no tolerance; None for words."""
    if row.printed is None:
        return None
    steps = tuple(step / UNITS[row.unit] for step in claim.steps)
    return accepted(row.printed, "exact", closed_form=True, bound=row.bound, error=row.error, steps=steps)


def tolerance(row: Row, evidence: Evidence, claim: Claim) -> str:
    """What would be accepted, for a person: `29.83 to 32.97 GB: 5% (memory)`, `the same word`."""
    rule = allowed(row, evidence, claim)
    if rule is not None:
        return f"{_range(rule, row)}: {rule.because}"
    if evidence.expect is None or row.printed is None:
        return "the same word"
    return f"{room(evidence.metric)} ({evidence.metric}) of the formula at that scale"


def _range(rule: Accepted, row: Row) -> str:
    low, high = _number(rule.low, row.printed), _number(rule.high, row.printed)
    unit = row.unit if row.unit in ("", "x", "%") else f" {row.unit}"
    if rule.low == float("-inf"):
        return f"{'below' if rule.open_high else 'at most'} {high}{unit}"
    if rule.high == float("inf"):
        return f"{'above' if rule.open_low else 'at least'} {low}{unit}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _number(value: float, like: Printed | None) -> str:
    """Six significant digits, in the magnitude that is printed: the ends are finer than the printed number."""
    letter, size = magnitude(like)
    return f"{value / size:.6g}{letter}"
