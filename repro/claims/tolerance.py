"""Rule that decides whether a tested value agrees with a published value, in the same way for all ledger rows.

A `value` agrees if it lies in the widest of three ranges:

1. The printed digits of the source.  A closed form may be rounded, or truncated if the number has three digits or more
   (the ZeRO paper does both: 41.25 -> 41.3, but 4187.5 -> 4187).  Simulated and measured values may only be rounded.
   Counts must be equal (4.4 calls are not 4).
2. The error of a value digitised from a figure, if the ledger states one.
3. The tolerance of the metric's class (`RELATIVE_TOLERANCE`), for simulated and measured values only, because a closed
   form has no noise.  Class `size` applies to closed forms too.

Other statements (`STATEMENTS`) have these rules:

- An `order` or an `event` ("ok", "oom", "forward") agrees if the words are equal.
- A `bound` ("over 38") ends at the printed number.  Only the ledger's error and the interval of the value widen it.
- `up to` must reach the number after rounding (9.5 counts as 10).  Above the number, the rule of a `value` applies.
- A `threshold` ("the largest model is 1.3B") agrees from the printed size, less its rounding and at most 5 %, to below
  the next larger size that the source tried.  The same applies to `up to` in class `limit`.

A scaled-down twin is compared with the formula at its own scale, which the ledger gives as `expect`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from repro.claims.ledger import Claim, Evidence, Row
from repro.claims.published import UNITS, PrintedNumber, format_value, magnitude

RELATIVE_TOLERANCE: dict[str, float] = {
    "exact": 0.0,
    "exact-padding": 1e-3,
    "parity": 1e-5,
    "memory": 0.05,
    "size": 0.05,
    "limit": 0.0,
    "throughput": 0.15,
    "time": 0.15,
    "ratio": 0.12,
    "share": 0.0,
    "quality": 0.0,
}
"""Relative tolerance of the comparison with a published value, by class of metric.

`exact`: counts and closed forms.  `exact-padding`: bytes, except for the padding of shards and the few scalars (loss,
norm) that a real step adds.  `parity`: the same loss from another layout in fp32.  `size`: the name of a model
("100B"), against its true parameter count.  `limit`: the largest model that fits; the sizes that the source tried
(`Claim.steps`) give its tolerance.  `quality`: scores of the published weights.
"""
TOLERANCE_POINTS: dict[str, float] = {"share": 3.0}
"""Absolute tolerance in percentage points, for classes whose unit is %.

`share`: lost or gained time as a share of the compute time.  Its errors (message time, unequal stages, other processes)
are shares of the compute time too and do not shrink with the lost time, so a relative tolerance would be too strict.
"""
NOISELESS_METRICS = ("exact", "exact-padding", "parity")
"""Metric classes without noise. Measured values and counts of these classes must be equal without rounding."""
COUNT_UNITS = ("", "x", "calls", "elements", "bytes", "samples", "steps", "GPUs")
"""Units of values that count items or multiples, such as elements or bytes per parameter."""
UP_TO = "up to"
BOUNDS = ("", "over", "at least", "under", "at most", UP_TO)
"""Words with which a source can state a number as a bound; empty: the number is no bound."""
VALUE, BOUND, ORDER, EVENT, THRESHOLD = STATEMENTS = ("value", "bound", "order", "event", "threshold")
"""Kinds of published statements: a number, a bound, an order of values, an outcome, or a largest model that fits."""
EVENT_FUNCTIONS = frozenset({"outcome", "failure", "fit_outcome"})
"""Functions of ledger expressions (tests of published values) that return the outcome of a run, such as "oom"."""
MAX_TRUNCATED_SHARE = 0.01
"""Maximum ratio of one unit in the last printed digit to the number, for a closed form that may be truncated."""
SIZE_ROUNDING = RELATIVE_TOLERANCE["size"]
"""Maximum relative rounding of a published size limit: 5.5B is not 6B, and 0.5B is not 1B."""
_ROUNDING = 1e-12
"""Relative tolerance for rounding errors of floating-point arithmetic."""


@dataclass(frozen=True)
class AcceptedRange:
    """Range of values that agree with a published value: `low` to `high`, open or closed; `because`: its rule."""

    low: float
    high: float
    open_low: bool
    open_high: bool
    because: str

    def meets(self, low: float, high: float) -> bool:
        """Return whether the interval `[low, high]` of a tested value overlaps the accepted values."""
        slack = _ROUNDING * max(abs(low), abs(high))
        above = high > self.low if self.open_low else high >= self.low - slack
        below = low < self.high if self.open_high else low <= self.high + slack
        return above and below

    def margin(self, low: float, high: float, published: float) -> tuple[float, float]:
        """Return how far the interval `[low, high]` may move down and up and still overlap the accepted values.

        Both distances are divided by `published`.
        """
        slack = _ROUNDING * max(abs(low), abs(high))
        ends = (high - self.low, self.high - low)
        down, up = (
            0.0 if end <= slack else end / abs(published) if published else float("inf") for end in ends
        )
        return down, up


def accepted_range(
    published: PrintedNumber,
    metric: str,
    *,
    closed_form: bool,
    bound: str = "",
    error: float = 0.0,
    steps: tuple[float, ...] = (),
    count: bool = False,
) -> AcceptedRange:
    """Return the range of values that agree with a published number, in the published unit.

    `closed_form`: the evidence is analytic.  `error`: error of a digitised value, or of a rounding that the source
    mentions.  `steps`: model sizes that the source tried, for class `limit`.  `count`: the value counts items or
    multiples and must be equal.
    """
    low, high = published.low, published.high
    count = count and metric in NOISELESS_METRICS
    if metric in NOISELESS_METRICS and not bound and (count or not closed_form):
        slack = RELATIVE_TOLERANCE[metric] * max(abs(low), abs(high))
        return AcceptedRange(
            low - slack, high + slack, False, False, "exactly" if not slack else f"{slack:g}"
        )
    digitised = [(low - error, high + error, f"digitised +-{error:g}")] if error else []
    if bound and bound != UP_TO:
        start, end, why = (
            low - error,
            high + error,
            " and ".join(["printed bound", *(w[2] for w in digitised)]),
        )
        if bound in ("under", "at most"):
            return AcceptedRange(float("-inf"), end, False, bound == "under", why)
        return AcceptedRange(start, float("inf"), bound == "over", False, why)
    if metric == "limit" and not closed_form:
        start = low - min(published.step / 2, SIZE_ROUNDING * low) - error
        end = min((step for step in steps if step > high), default=high + published.step / 2)
        return AcceptedRange(start, end, False, True, "below the next larger size that the source tried")
    relative = 0.0 if closed_form and metric != "size" else RELATIVE_TOLERANCE[metric]
    widened = list(digitised)
    if relative:
        widened.append((low - relative * abs(low), high + relative * abs(high), f"{relative:.0%} ({metric})"))
    if metric in TOLERANCE_POINTS and not closed_form:
        points = TOLERANCE_POINTS[metric]
        widened.append((low - points, high + points, f"{points:g} points ({metric})"))
    # A source may truncate a number, so any value below the next printed number agrees. The ends of a printed range
    # may only be rounded.
    truncated = closed_form and low == high and published.step <= MAX_TRUNCATED_SHARE * low
    half = 0.0 if count else published.step / 2
    digits = (low - half, high + (2 * half if truncated else half))
    if bound:
        end = max(digits[1], *(w[1] for w in widened)) if widened else digits[1]
        near = " or ".join(w[2] for w in widened) or ("equal" if count else "printed digits")
        return AcceptedRange(
            digits[0] - error, end, False, not widened and not count, f"{bound}, and near: {near}"
        )
    wider = [w for w in widened if w[0] < digits[0] or w[1] >= digits[1]]
    if not wider:
        return AcceptedRange(*digits, False, True, "printed digits")
    start, end = min(digits[0], *(w[0] for w in wider)), max(digits[1], *(w[1] for w in wider))
    return AcceptedRange(start, end, False, end == digits[1], " or ".join(w[2] for w in wider))


def statement_of(
    printed: PrintedNumber | None, published: str, bound: str, metric: str, calls: Set[str]
) -> str:
    """Return the kind of a published statement from its text and from the functions `calls` in its expressions."""
    if bound:
        return BOUND
    if printed is not None:
        return THRESHOLD if metric == "limit" else VALUE
    if "rising" in calls or "<" in published:
        return ORDER
    return EVENT if calls & EVENT_FUNCTIONS or published in ("ok", "oom") else VALUE


def accepted_range_at_scale(expected: tuple[float, float], metric: str) -> AcceptedRange:
    """Return the range of values of a scaled-down run that agree with the interval `expected` of a formula."""
    relative = max(RELATIVE_TOLERANCE[metric], _ROUNDING)
    slack = relative * max(map(abs, expected)) + TOLERANCE_POINTS.get(metric, 0)
    return AcceptedRange(expected[0] - slack, expected[1] + slack, False, False, metric)


def describe_class_tolerance(metric: str) -> str:
    """Return the tolerance of a metric class as text: `exactly`, `within 0.001 relative`, `within 3 points`."""
    if metric in TOLERANCE_POINTS:
        return f"within {TOLERANCE_POINTS[metric]:g} points"
    return f"within {RELATIVE_TOLERANCE[metric]:g} relative" if RELATIVE_TOLERANCE[metric] else "exactly"


def accepted_range_of_row(row: Row, evidence: Evidence, claim: Claim) -> AcceptedRange | None:
    """Return the range of values that agree with a published value under one test, in the published unit.

    Return None for a scaled-down run and for published words, which are not compared with a published number.
    """
    if evidence.expect is not None or row.printed is None:
        return None
    return accepted_range(
        row.printed,
        evidence.metric,
        closed_form=evidence.kind == "analytic",
        bound=row.bound,
        error=row.error,
        steps=tuple(step / UNITS[row.unit] for step in claim.steps),
        count=row.unit in COUNT_UNITS and not magnitude(row.printed)[0],
    )


def published_range(row: Row, claim: Claim) -> AcceptedRange | None:
    """Return the range of a published value, in its own unit, from its printed digits and error; None for words."""
    if row.printed is None:
        return None
    steps = tuple(step / UNITS[row.unit] for step in claim.steps)
    return accepted_range(
        row.printed, "exact", closed_form=True, bound=row.bound, error=row.error, steps=steps
    )


def describe_tolerance(row: Row, evidence: Evidence, claim: Claim) -> str:
    """Return the text of the accepted values and their rule: `29.83 to 32.97 GB: 5% (memory)`, `the same word`."""
    rule = accepted_range_of_row(row, evidence, claim)
    if rule is not None:
        return f"{_range(rule, row)}: {rule.because}"
    if evidence.expect is None or row.printed is None:
        return "the same word"
    tolerance = describe_class_tolerance(evidence.metric)
    return f"{tolerance} (metric {evidence.metric}) of the formula at the scale of the run"


def _range(rule: AcceptedRange, row: Row) -> str:
    low, high = format_value(rule.low, row.printed), format_value(rule.high, row.printed)
    unit = row.unit if row.unit in ("", "x", "%") else f" {row.unit}"
    if rule.low == float("-inf"):
        return f"{'below' if rule.open_high else 'at most'} {high}{unit}"
    if rule.high == float("inf"):
        return f"{'above' if rule.open_low else 'at least'} {low}{unit}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
