"""Evaluation of one test of a published value: the tested value, its uncertainty from uncertain inputs, its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from repro.claims.expression import Expression, ExpressionError, Result, evaluate_expression
from repro.claims.formulas import CONSTANTS, FORMULAS, SCRIPT_COUNTS
from repro.claims.ledger import CLOSED_FORM, EMULATED, ITSELF, Claim, Evidence, Row
from repro.claims.one_device import describe_fits, device_functions, scale_of_fits
from repro.claims.published import UNITS, digitised, format_value, printed
from repro.claims.records import Missing, Records
from repro.claims.tolerance import (
    NOISELESS_METRICS,
    accepted_range_at_scale,
    accepted_range_of_row,
    describe_class_tolerance,
    describe_tolerance,
    published_range,
)
from repro.claims.verdicts import (
    FOLLOWS,
    INCONSISTENT,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    POSSIBLE,
    REPRODUCED,
    Finding,
    InputUncertainty,
)
from repro.config.suites import SUITES
from repro.results.interval import Case, likely_range, possible_range
from repro.results.reference_records import device_of
from repro.results.schema import MEASURED, SIMULATED, ExperimentRecord, FitRecord

_INPUTS = {"printed": printed, "digitised": digitised}


def evaluate_evidence(
    evidence: Evidence, row: Row, claim: Claim, records: Records, read: Sequence[str]
) -> Finding:
    """Evaluate one test of a published value on the records of the experiments `read`, and return its verdict.

    Measured and emulated values come from the user's own records, or else from reference records (packaged records of
    another machine). Missing records give the verdict `not run`. A simulated value that misses the published value
    gives `possible` if the ranges of the system's uncertain inputs contain the published value.
    """
    found = _evaluate_on(records, evidence, row, claim, read)
    if evidence.kind not in (MEASURED, EMULATED) or found.decided:
        return found
    others = (_evaluate_on(reference, evidence, row, claim, read) for reference in records.references)
    return next((other for other in others if other.decided), found)


def _evaluate_on(
    records: Records, evidence: Evidence, row: Row, claim: Claim, read: Sequence[str]
) -> Finding:
    """Evaluate one test of a published value on one set of records: the user's own, or those of another machine."""
    common: dict[str, Any] = {
        "kind": evidence.kind,
        "scale": evidence.scale,
        "libraries": tuple(records.libraries(read)) if evidence.kind in (MEASURED, EMULATED) else (),
        "origin": evidence.origin,
        "reading": evidence.reading,
        "expression": evidence.value.text,
        "tolerance": describe_tolerance(row, evidence, claim),
        "experiments": tuple(read),
    }
    yes, no = (
        (FOLLOWS, INCONSISTENT) if evidence.origin in (CLOSED_FORM, ITSELF) else (REPRODUCED, NOT_REPRODUCED)
    )
    functions: dict[str, Any] = {**FORMULAS, **SCRIPT_COUNTS, **_INPUTS}
    used: list[ExperimentRecord | FitRecord] = []
    if evidence.kind != "analytic":
        functions |= records.functions(evidence.kind) | device_functions(records.selection, used)
    variables = {**CONSTANTS, **row.variables}
    calibration = ""
    if row.calibrates and evidence.kind == SIMULATED:
        calibration = (
            f"no evidence, since the efficiency {row.calibrates} is calibrated on this published value"
        )
    try:
        value = evaluate_expression(evidence.value, functions, variables)
        expected = evaluate_expression(evidence.expect, functions, variables) if evidence.expect else None
        common |= _measured_where(evidence, records, used)
    except Missing as missing:
        return Finding(
            verdict=NOT_COMPARABLE if calibration else NOT_RUN,
            reason=calibration
            or f"{missing.experiment}: {missing.reason}; "
            f"`{missing.remedy or run_command(missing.suite, evidence.kind)}`",
            **common,
        )
    except ExpressionError as error:
        return Finding(verdict=NOT_RUN, reason=f"the value cannot be computed: {error}", **common)
    if isinstance(value.value, str) or (expected and isinstance(expected.value, str)):
        right = expected.value if expected else row.published
        reason = _joined(f"expected {right}", describe_fits(used))
        common |= {"value": value.value, "text": str(value.value), "expected": right}
        return Finding(verdict=yes if value.value == right else no, reason=reason, **common)
    value = _in_unit(value, row.unit)
    low, high, point = float(value.low), float(value.high), float(value.value)
    if calibration:
        return Finding(verdict=NOT_COMPARABLE, reason=calibration, **common, **_numbers(value, row))
    if expected is not None:
        expected = _in_unit(expected, row.unit)
        common["expected"] = expected.value
        # The point estimate of a noisy measurement is compared, because a wide interval would agree with any value.
        seen = (low, high) if evidence.metric in NOISELESS_METRICS else (point, point)
        rule = accepted_range_at_scale((float(expected.low), float(expected.high)), evidence.metric)
        expectation = format_value(float(expected.value))
        allowance = describe_class_tolerance(evidence.metric)
        formula = f"the formula at the scale of the run, {expectation}"
        reason = f"the tested value must agree {allowance} (metric {evidence.metric}) with {formula}"
    else:
        published = accepted_range_of_row(row, evidence, claim)
        assert published is not None
        rule, reason = published, _joined(published.because, describe_fits(used))
        # A point estimate is compared with a published number; an interval is compared with a bound ("over 38").
        seen = (low, high) if evidence.kind == "analytic" or row.bound else (point, point)
        if (
            evidence.kind != "analytic"
            and rule.meets(low, high)
            and not all(rule.meets(end, end) for end in (low, high))
        ):
            reason += "; the interval of the value reaches beyond the accepted values"
    verdict = no
    if rule.meets(*seen):
        verdict = yes
        known = row.printed if expected is None else expected
        common["margin"] = rule.margin(*seen, float(known.value)) if known is not None else None
    if evidence.kind == SIMULATED and expected is None:
        uncertainty = propagate_unknowns(evidence.value, row, read, records, functions)
        if uncertainty is not None:
            common["uncertainty"] = uncertainty = uncertainty.in_units_of(UNITS[row.unit])
            value = Result(value.value, uncertainty.low, uncertainty.high)
            if verdict == NOT_REPRODUCED:
                verdict, reason, common["deciding"] = _judge_miss(uncertainty, row, claim, reason)
    return Finding(verdict=verdict, reason=reason, **common, **_numbers(value, row))


def _numbers(value: Result, row: Row) -> dict[str, Any]:
    """Return a tested value, its interval and their text for display, as fields of a test result (`Finding`)."""
    return {"value": value.value, "low": value.low, "high": value.high, "text": _text(value, row)}


def _joined(reason: str, detail: str) -> str:
    return f"{reason}; {detail}" if detail else reason


def _measured_where(
    evidence: Evidence, records: Records, used: Sequence[ExperimentRecord | FitRecord]
) -> dict[str, Any]:
    """Return as fields of a test result (`Finding`): its scale (such as one rank of 64), and the measuring device."""
    device = device_of(used[0]) if used else ""
    return {
        "scale": scale_of_fits(used) or evidence.scale,
        "measured_on": records.label or device,
        "is_reference": bool(records.label),
    }


def _judge_miss(
    uncertainty: InputUncertainty, row: Row, claim: Claim, rule: str
) -> tuple[str, str, tuple[str, ...]]:
    """Return verdict and reason for a simulated value that misses the published one, and inputs that explain it."""
    published = published_range(row, claim)
    assert published is not None
    interval = uncertainty.least, uncertainty.most
    ends = " to ".join(dict.fromkeys(format_value(end, row.printed) for end in interval))
    if not published.meets(*interval):
        why = f"the ranges of all uncertain inputs give the interval {ends} without the published value"
        return NOT_REPRODUCED, f"{rule}; {why}", ()
    found = uncertainty.deciding_unknowns(published.meets)
    which = f"the uncertainty of {' and '.join(found)} decides the verdict"
    why = f"the ranges of all uncertain inputs give the interval {ends}, which includes the published value; {which}"
    return POSSIBLE, f"{rule}; {why}", found


def propagate_unknowns(
    expression: Expression,
    row: Row,
    experiments: Sequence[str],
    records: Records,
    functions: Mapping[str, Callable[..., Any]],
) -> InputUncertainty | None:
    """Return the uncertainty of a simulated value from uncertain inputs; None without uncertain inputs.

    The expression is evaluated for every case (choice of values of the uncertain inputs) in the simulated records of
    `experiments`. Both sides of a ratio use the same case, so that the effects of their common uncertain inputs cancel.
    """
    found = records.intervals(experiments)
    draws = min((len(interval.draws) for interval in found), default=0)
    if not draws:
        return None
    variables = {**CONSTANTS, **row.variables}

    def value(case: Case | None) -> Any:
        moved = {**functions, **records.functions(SIMULATED, case)}
        return evaluate_expression(expression, moved, variables).value

    try:
        best, joint = value(None), [value(number) for number in range(draws)]
        if isinstance(best, str):
            return None
        keys = dict.fromkeys(move.key for interval in found for move in interval.moves)
        alone = {key: (value((key, False)), value((key, True))) for key in keys}
    except ExpressionError:  # The expression divides by zero for some values of the uncertain inputs.
        return None
    alone = {key: ends for key, ends in alone.items() if set(ends) != {best}}
    if not alone:
        return None
    alone = dict(sorted(alone.items(), key=lambda item: -abs(item[1][1] - item[1][0])))
    ends = [end for pair in alone.values() for end in pair]
    return InputUncertainty(*likely_range(joint, best), *possible_range([*joint, *ends], best), best, alone)


@cache
def run_command(suite: str, kind: str) -> str:
    """Return the command that runs or simulates a suite and so creates its missing records."""
    file = f"suites/{suite}.toml" if suite in SUITES.names() else f"{suite}.toml"
    return f"repro run {file}" + (f" --evidence {kind}" if kind == SIMULATED else "")


def _in_unit(result: Result, unit: str) -> Result:
    size = UNITS[unit]
    if size == 1:
        return result
    return Result(float(result.value) / size, float(result.low) / size, float(result.high) / size)


def _text(result: Result, row: Row) -> str:
    text = format_value(float(result.value), row.printed)
    if result.low != result.high:
        text += f" [{format_value(float(result.low), row.printed)}, {format_value(float(result.high), row.printed)}]"
    return text
