"""One piece of evidence for a row: its value in the row's unit, held against the tolerance.

What is missing makes it `not run`; a predicted value that misses is `possible` where unknown inputs leave room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.claims.allowed import allowed, stated, tolerance
from repro.claims.doubt import Doubt, doubted
from repro.claims.expression import ExpressionError, Result, evaluate
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.ledger import EMULATED, ITSELF, Claim, Evidence, Row
from repro.claims.published import UNITS, digitised, printed, show
from repro.claims.records import Missing, Records
from repro.claims.results import (
    CONSISTENT,
    INCONSISTENT,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    POSSIBLE,
    REPRODUCED,
    Finding,
)
from repro.claims.scripts import COUNTS
from repro.claims.tolerance import NOISELESS, Accepted, agrees_at_scale, room
from repro.results.schema import MEASURED, SIMULATED

_INPUTS = {"printed": printed, "digitised": digitised}


def find(evidence: Evidence, row: Row, claim: Claim, records: Records, read: Sequence[str]) -> Finding:
    """Evaluate one piece of evidence, which reads the experiments `read`, and compare it."""
    common: dict[str, Any] = {
        "kind": evidence.kind,
        "scale": evidence.scale,
        "libraries": tuple(records.libraries(read)) if evidence.kind in (MEASURED, EMULATED) else (),
        "origin": evidence.origin,
        "expression": evidence.value.text,
        "tolerance": tolerance(row, evidence, claim),
        "experiments": tuple(read),
    }
    yes, no = (CONSISTENT, INCONSISTENT) if evidence.origin == ITSELF else (REPRODUCED, NOT_REPRODUCED)
    functions: dict[str, Any] = {**FORMULAS, **COUNTS, **_INPUTS}
    if evidence.kind != "analytic":
        functions |= records.functions(evidence.kind)
    variables = {**CONSTANTS, **row.variables}
    calibration = ""
    if row.calibrates and evidence.kind == SIMULATED:
        calibration = f"calibration, no evidence: {row.calibrates} takes its efficiency from this value"
    try:
        value = evaluate(evidence.value, functions, variables)
        expected = evaluate(evidence.expect, functions, variables) if evidence.expect else None
    except Missing as missing:
        return Finding(
            verdict=NOT_COMPARABLE if calibration else NOT_RUN,
            reason=calibration
            or f"{missing.experiment}: {missing.reason}; "
            f"`{missing.remedy or how_to_run(missing.suite, evidence.kind)}`",
            **common,
        )
    except ExpressionError as error:
        return Finding(verdict=NOT_RUN, reason=f"cannot be computed: {error}", **common)
    if isinstance(value.value, str) or (expected and isinstance(expected.value, str)):
        right = expected.value if expected else row.published
        verdict = yes if value.value == right else no
        return Finding(
            verdict=verdict,
            reason=f"expected {right}",
            value=value.value,
            expected=right,
            text=str(value.value),
            **common,
        )
    value = _in_unit(value, row.unit)
    low, high = float(value.low), float(value.high)
    if calibration:
        return Finding(
            verdict=NOT_COMPARABLE,
            reason=calibration,
            value=value.value,
            low=value.low,
            high=value.high,
            text=_text(value, row),
            **common,
        )
    if expected is not None:
        expected = _in_unit(expected, row.unit)
        point = float(value.value)
        seen = (low, high) if evidence.metric in NOISELESS else (point, point)  # noise must not help
        agrees = agrees_at_scale(seen, (float(expected.low), float(expected.high)), evidence.metric)
        expectation = show(float(expected.value))
        reason = f"{expectation} expected at this scale, {room(evidence.metric)} ({evidence.metric})"
    else:
        rule = allowed(row, evidence, claim)
        assert rule is not None
        reason = rule.because
        point = float(value.value)
        # Noise must not help: the point decides, but at a bound, which the evidence's own interval widens.
        seen = (low, high) if evidence.kind == "analytic" or row.bound else (point, point)
        agrees = rule.meets(*seen)
        if evidence.kind != "analytic" and _across(rule, low, high):
            reason += "; the interval reaches across the limit"
    verdict = yes if agrees else no
    if evidence.kind == SIMULATED and expected is None:
        doubt = doubted(evidence, row, read, records, functions)
        if doubt is not None:
            common["doubt"] = doubt = doubt.over(UNITS[row.unit])
            value = Result(value.value, doubt.low, doubt.high)
            if verdict == NOT_REPRODUCED:
                verdict, reason, common["deciding"] = _in_doubt(doubt, row, claim, reason)
    return Finding(
        verdict=verdict,
        reason=reason,
        value=value.value,
        low=value.low,
        high=value.high,
        expected=expected.value if expected else None,
        text=_text(value, row),
        **common,
    )


def _in_doubt(doubt: Doubt, row: Row, claim: Claim, rule: str) -> tuple[str, str, tuple[str, ...]]:
    """Of a predicted time whose best value misses: the verdict, the reason and the unknowns that decide."""
    published = stated(row, claim)
    assert published is not None
    ends = " to ".join(dict.fromkeys(show(end, row.printed) for end in (doubt.least, doubt.most)))
    if not published.meets(doubt.least, doubt.most):
        why = f"the published value lies outside of {ends}, whatever unknown inputs are"
        return NOT_REPRODUCED, f"{rule}; {why}", ()
    found = doubt.deciding(published.meets)
    which = f"{found[0]} decides" if len(found) == 1 else f"no one alone, {' and '.join(found)} most of all"
    why = f"the published value lies in {ends}, what unknown inputs leave: {which}"
    return POSSIBLE, f"{rule}; {why}", found


def _across(rule: Accepted, low: float, high: float) -> bool:
    return rule.meets(low, high) and not (rule.meets(low, low) and rule.meets(high, high))


def how_to_run(suite: str, kind: str) -> str:
    """What would bring the records of a suite that are missing."""
    return f"repro run suites/{suite}.toml" + (f" --evidence {kind}" if kind == SIMULATED else "")


def _in_unit(result: Result, unit: str) -> Result:
    size = UNITS[unit]
    if size == 1:
        return result
    return Result(float(result.value) / size, float(result.low) / size, float(result.high) / size)


def _text(result: Result, row: Row) -> str:
    text = show(float(result.value), row.printed)
    if result.low != result.high:
        text += f" [{show(float(result.low), row.printed)}, {show(float(result.high), row.printed)}]"
    return text
