"""Independence of evidence: inputs shared with the published value, and the number of independent quantities tested.

Many published values test one formula, so tests are counted by the quantities that they read (docs/claims.md):

- Model sizes alone decide some metrics (bytes of states, calls, bytes sent): one quantity per metric.
- The layout decides time, fit, peak memory and loss: one quantity per experiment.
- Each count of script lines and each score of weights is one quantity. Quantities of another library are separate.

Tests are counted in order of their number of quantities. A test is skipped if counted tests read all its quantities.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.claims.expression import (
    Expression,
    ExpressionError,
    Uncertain,
    arguments,
    evaluate_expression,
    literals,
    parse,
    replace_number,
)
from repro.claims.formulas import CONSTANTS, FORMULAS, SCRIPT_COUNTS, bubble_fraction
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF, KINDS, Row
from repro.claims.one_device import DEVICE_FUNCTIONS
from repro.claims.published import UNITS
from repro.claims.tolerance import COUNT_UNITS
from repro.claims.verdicts import GOOD, NOT_COMPARABLE, POSSIBLE, ClaimResult, Finding, RowResult

ARITHMETIC_FUNCTIONS = frozenset({"rounded", "mean", "sqrt"})
"""Functions of ledger expressions that are plain arithmetic and not a formula of a paper."""
SCORE_FUNCTION = "evaluated"
"""Function of ledger expressions that reads evaluation scores of model weights."""
PAPER_FUNCTIONS = FORMULAS.keys() - ARITHMETIC_FUNCTIONS
UBIQUITOUS_NUMBERS = frozenset({0.0, 1.0, 2.0})
"""Numbers in many formulas, such as two bytes per element; equality with them is no sign of a shared input."""


def analytic_origin(expression: Expression, variables: Mapping[str, Any]) -> str:
    """Return the origin of an analytic value: `COUNT` (script lines), `CLOSED_FORM` (formula) or `ITSELF` (source)."""
    if isinstance(expression.tree, ast.Call) and expression.calls <= SCRIPT_COUNTS.keys():
        return COUNT
    is_formula = expression.calls & PAPER_FUNCTIONS and not _reads_printed_numbers(expression, variables)
    return CLOSED_FORM if is_formula else ITSELF


def is_constant(expression: Expression, variables: Mapping[str, Any]) -> bool:
    """Return whether no literal (except 0 and 1) and no table column of an analytic expression affects its value."""
    if expression.calls & SCRIPT_COUNTS.keys() or _reads_printed_numbers(expression, variables):
        return False
    columns = {name: variables[name] for name in expression.names & variables.keys()}
    unchanged = _value(expression, columns)
    return all(_value(*changed) in (unchanged, None) for changed in _changed_inputs(expression, columns))


def _changed_inputs(
    expression: Expression, columns: Mapping[str, Any]
) -> Iterator[tuple[Expression, Mapping[str, Any]]]:
    """Yield variants of an expression with one literal or table column changed, to find those that affect its value."""
    for name, number in columns.items():
        if not isinstance(number, str):
            for other in (2 * number, number + 1, number - 1):
                yield expression, {**columns, name: other}
    for number in {*literals(expression)} - {0.0, 1.0}:
        for other in (2 * number, number + 1, number - 1):
            yield replace_number(expression, number, other), columns


_QUICK_FORMULAS = {**FORMULAS, "schedule_bubble": bubble_fraction}
"""Formulas by name. The slow `schedule_bubble`, which builds a pipeline schedule, is replaced by its closed form."""


def _value(expression: Expression, columns: Mapping[str, Any]) -> Any:
    """Return the value of an analytic expression; None if a formula rejects an argument, for example ZeRO stage 4."""
    try:
        return evaluate_expression(expression, _QUICK_FORMULAS, {**CONSTANTS, **columns}).value
    except ExpressionError:
        return None


def _reads_printed_numbers(expression: Expression, variables: Mapping[str, Any]) -> bool:
    columns = (variables.get(name) for name in expression.names)
    return bool(expression.calls & {"printed", "digitised"}) or any(isinstance(c, Uncertain) for c in columns)


def shared_input(row: Row) -> str:
    """Return as text how a test uses the published value as an input; empty if it does not, or if `given` says so."""
    if row.given:
        return ""
    published = None if row.printed is None else row.printed.value * UNITS[row.unit]
    for evidence in row.evidence:
        if evidence.kind == "analytic" or (row.calibrates and evidence.kind == "simulated"):
            continue
        if evidence.expect is not None and evidence.expect.text == evidence.value.text:
            return "the key `expect` has the same expression as the key `value`"
        called = arguments(evidence.value, row.variables)
        by_condition = DEVICE_FUNCTIONS | {SCORE_FUNCTION}
        read = {f for f, texts in called if f in by_condition or "/" in "".join(texts)}
        if read <= {"setting"}:
            return "the expression reads only settings of the suite's experiments"
        if read <= {"setting", "parameters"} and row.unit == "parameters":
            return "the expression reads only the parameter count of the suite's model"
        if evidence.expect is None and _typed(evidence.value, row.variables, published, row.unit):
            return "the expression contains the published value, as a number or in a column of the table"
    return ""


def _typed(expression: Expression, variables: Mapping[str, Any], published: float | None, unit: str) -> bool:
    """Return whether an expression contains the published value that it tests, as a number or as a table column.

    Table columns and arguments of formulas are sizes, so they are compared only with published counts and sizes. For
    example, an argument of 7.5e9 parameters is not a published value of 7.5 GB.
    """
    outside = unit not in (*COUNT_UNITS, "parameters")
    typed = literals(expression, PAPER_FUNCTIONS if outside else frozenset())
    columns = [variables[name] for name in expression.names if name in variables] if not outside else []
    same = [number for number in (*typed, *columns) if number == published]
    return any(number not in UBIQUITOUS_NUMBERS for number in same)


Quantity = tuple[str, ...]
STATE_METRICS = ("states", "parameters", "gradients", "optimizer")
LAYOUT_METRICS = ("peak", "reserved", "used", "activations", "allocated", "cached")
"""Names X of the memory metrics `memory.X_bytes` that depend on the parallel layout and have no closed form."""
FIT_FUNCTIONS = ("outcome", "failure", "largest", "smallest")
LOSS_CURVE_FUNCTIONS = ("strayed", "apart")
"""Functions of ledger expressions that compare loss curves; their first argument is the tested experiment."""


FAILS, OPEN, HOLDS = range(3)
"""States of a quantity that several published values test, worst first: one test misses, is undecided, or all agree."""


@dataclass(frozen=True)
class QuantityCounts:
    """Counts of independent quantities, such as an experiment's step time, that one kind of evidence tests."""

    tested: int
    hold: int
    """Number of tested quantities (such as an experiment's step time) of which all tests agree with the sources."""
    possible: int = 0
    """Number of tested quantities (such as an experiment's step time) with a `possible` test and no contradiction."""


def count_independent(results: Sequence[ClaimResult], possible: bool = False) -> dict[str, QuantityCounts]:
    """Return how many independent quantities each kind of evidence tests. `possible`: include tests without a run."""
    groups: dict[str, dict[frozenset[Quantity], int]] = {name: {} for name in (*KINDS, ITSELF)}
    for result in results:
        for row in result.rows:
            for finding in row.findings:
                if finding.decided or (possible and NOT_COMPARABLE not in (row.verdict, finding.verdict)):
                    of = groups[ITSELF if finding.itself else finding.kind]
                    read = frozenset(quantities_read(finding, row, result))
                    holds = (
                        HOLDS if finding.verdict in GOOD else OPEN if finding.verdict == POSSIBLE else FAILS
                    )
                    of[read] = min(of.get(read, holds), holds)
    return {name: _independent(found) for name, found in groups.items()}


def _independent(groups: dict[frozenset[Quantity], int]) -> QuantityCounts:
    seen: set[Quantity] = set()
    counted: list[int] = []
    for read, holds in sorted(groups.items(), key=lambda item: (len(item[0]), sorted(item[0]))):
        if not read <= seen:
            counted.append(holds)
            seen |= read
    return QuantityCounts(len(counted), counted.count(HOLDS), counted.count(OPEN))


def quantities_read(finding: Finding, row: RowResult, result: ClaimResult) -> Iterable[Quantity]:
    """Return the independent quantities that a test reads, such as the step time of one experiment."""
    if finding.itself:
        return [(result.claim.id, finding.expression)]
    expression = parse(finding.expression)
    if finding.kind == "analytic":
        return [(name,) for name in expression.calls & SCRIPT_COUNTS.keys()]
    found: list[Quantity] = []
    for function, texts in arguments(expression, row.row.variables):
        experiments = [text for text in texts if "/" in text]
        if function in FIT_FUNCTIONS:
            found += [("fits", name) for name in experiments]
        elif function == "compared":
            found += [("time", name) for name in experiments]
        elif function in LOSS_CURVE_FUNCTIONS:
            found.append(("loss", experiments[0]))
        elif function == SCORE_FUNCTION:
            found.append(("score", *texts))
        elif function == "metric" and len(texts) == 2 and not texts[1].startswith("model."):
            found.append(_quantity(*texts))
    found += _device_results(expression)
    return [(*quantity, *finding.libraries) for quantity in found] or [(finding.expression,)]


def _device_results(expression: Expression) -> list[Quantity]:
    """Return the independent quantities that one-device measurements give an expression: one per call of a function."""
    calls = [node for node in ast.walk(expression.tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in DEVICE_FUNCTIONS]
    return [("one device", *sorted(map(ast.unparse, call.keywords))) for call in named]


def _quantity(experiment: str, metric: str) -> Quantity:
    """Return the quantity that determines a metric: for a throughput, it is the experiment's step time."""
    area, _, rest = metric.partition(".")
    if area == "memory":
        part = rest.removesuffix("_bytes")
        return (
            (area, part, experiment)
            if part in LAYOUT_METRICS
            else (area, "states" if part in STATE_METRICS else part)
        )
    if area in ("comm", "flops"):
        return (metric,)
    timed = area.endswith(("_per_s", "seconds"))
    return ("time" if timed else metric, experiment)
