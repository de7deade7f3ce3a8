"""Independence of evidence: shared inputs with the published value, and the number of independent quantities tested.

**Origin.** A formula of a paper on sizes is a `closed form`, a simulated step a `trace`, real processes a `run`, and a
count of this repository's scripts a `count`. Every other value is `the source against itself`: arithmetic on columns
and literals, a printed or digitised number, or a published rate typed as a float. A formula compared with a derived
value and a row whose answer is `given` also are. Such a value shows only that a source is consistent.

**Independent quantities.** Many cells of the ledger evaluate one formula. A test is the set of quantities that one
finding reads:

- A closed form or a count reads its functions. Three functions evaluate the formula of model states: one quantity.
- A trace or a run reads quantities that sizes decide (bytes of states, calls, bytes sent): one quantity per name.
- A trace or a run also reads results of a layout (time, fit, peak memory, loss): one quantity per experiment.
- Scores of weights are one quantity each. Quantities of another library are separate from those of this suite.
- The source against itself is one quantity per expression of a claim.

Tests are counted in order of their number of quantities. A test counts if it reads a quantity that no counted test
has read. The rates of two runs and their ratio count two. All rates, times and shares of one run count one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.claims.expression import Expression, Uncertain, arguments, literals, parse
from repro.claims.formulas import FORMULAS, SCRIPT_COUNTS
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF, KINDS, Row
from repro.claims.one_device import DEVICE_FUNCTIONS
from repro.claims.published import UNITS
from repro.claims.tolerance import COUNT_UNITS
from repro.claims.verdicts import GOOD, NOT_COMPARABLE, POSSIBLE, ClaimResult, Finding, RowResult

ARITHMETIC_FUNCTIONS = frozenset({"rounded", "mean", "sqrt"})
"""Functions of expressions that are no formula of a paper."""
SCORE_FUNCTION = "evaluated"
"""The function of expressions that reads scores of weights."""
PAPER_FUNCTIONS = FORMULAS.keys() - ARITHMETIC_FUNCTIONS
UBIQUITOUS_NUMBERS = frozenset({0.0, 1.0, 2.0})
"""Numbers that every formula has: one layer, two bytes an element."""
LARGE_RESULT_UNITS = frozenset({"TFLOP/s", "PFLOP/s", "EFLOP", "PFLOP/s-days"})
"""Units of large results: an equal literal is the result and not a size."""

PUBLISHED_VOCABULARIES = frozenset({0.0, 50257.0, 50304.0, 51200.0, 53248.0})
"""Vocabulary sizes in sources: GPT-2's, with its two paddings, and Yuan's file, padded.  0 omits the vocabulary."""


def analytic_origin(
    expression: Expression,
    variables: Mapping[str, Any],
    certainty: str,
    published: float | None,
    unit: str,
    rates: frozenset[float],
) -> str:
    """Return the origin of an analytic expression: `CLOSED_FORM`, `COUNT` or `ITSELF`.

    `published`: in base units.  `rates`: published values whose unit is one of `LARGE_RESULT_UNITS`, in base units.
    """
    if isinstance(expression.tree, ast.Call) and expression.calls <= SCRIPT_COUNTS.keys():
        return COUNT
    if certainty == "derived" or not expression.calls & PAPER_FUNCTIONS:
        return ITSELF
    if expression.calls & {"printed", "digitised"} or rates.intersection(literals(expression)):
        return ITSELF
    if any(isinstance(variables.get(name), Uncertain) for name in expression.names):
        return ITSELF
    if (
        _typed(expression, variables, published, unit)
        or not _vocabularies(expression) <= PUBLISHED_VOCABULARIES
    ):
        return ITSELF
    return CLOSED_FORM


def shared_input(row: Row) -> str:
    """Return how an expression of a trace or a run uses the published value as an input.

    The result is empty without such an input, and for a row that names its `given` answer.
    """
    if row.given:
        return ""
    published = None if row.printed is None else row.printed.value * UNITS[row.unit]
    for evidence in row.evidence:
        if evidence.kind == "analytic" or (row.calibrates and evidence.kind == "simulated"):
            continue
        if evidence.expect is not None and evidence.expect.text == evidence.value.text:
            return "what is expected is the value itself"
        called = arguments(evidence.value, row.variables)
        by_condition = DEVICE_FUNCTIONS | {SCORE_FUNCTION}
        read = {f for f, texts in called if f in by_condition or "/" in "".join(texts)}
        if read <= {"setting"}:
            return "it reads nothing but settings of the suite"
        if read <= {"setting", "parameters"} and row.unit == "parameters":
            return "it reads nothing but the size of the suite's own model"
        if evidence.expect is None and _typed(evidence.value, row.variables, published, row.unit):
            return "the published value is typed in the expression, or a column of it"
    return ""


def _typed(expression: Expression, variables: Mapping[str, Any], published: float | None, unit: str) -> bool:
    """Return whether the published value is among the inputs.

    Inside a formula, whose arguments are sizes, only a count or a size can be it: 7.5e9 parameters are not 7.5 GB.
    """
    outside = unit not in (*COUNT_UNITS, "parameters")
    typed = literals(expression, PAPER_FUNCTIONS if outside else frozenset())
    columns = [variables[name] for name in expression.names if name in variables] if not outside else []
    same = [number for number in (*typed, *columns) if number == published]
    return any(number not in UBIQUITOUS_NUMBERS for number in same)


def _vocabularies(expression: Expression) -> frozenset[float]:
    """Return the vocabulary sizes that an expression passes to formulas as literals."""
    found: set[float] = set()
    for node in ast.walk(expression.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _VOCABULARY:
            place = _VOCABULARY[node.func.id]
            given = [*node.args[place : place + 1], *(k.value for k in node.keywords if k.arg == "vocab")]
            numbers = [n.value for n in given if isinstance(n, ast.Constant)]
            found |= {float(number) for number in numbers if isinstance(number, int | float)}
    return frozenset(found)


_VOCABULARY = {
    name: list(inspect.signature(FORMULAS[name]).parameters).index("vocab")
    for name in ("gpt_params", "gpt_flops")
}


Quantity = tuple[str, ...]
FORMULA_OF_FUNCTION = {"max_params": "model_state_bytes", "memory_reduction": "model_state_bytes"}
"""Map from a function to the function whose formula it evaluates."""
STATE_METRICS = ("states", "parameters", "gradients", "optimizer")
LAYOUT_METRICS = ("peak", "reserved", "used", "activations", "allocated", "cached")
"""X of the metrics `memory.X_bytes` that depend on the layout and have no closed form."""
FIT_FUNCTIONS = ("outcome", "failure", "largest", "smallest")
LOSS_CURVE_FUNCTIONS = ("strayed", "apart")
"""Functions on loss curves, whose first argument is the tested experiment and whose others are references."""


FAILS, OPEN, HOLDS = range(3)
"""Worst outcome of all cells that read the same quantities."""


@dataclass(frozen=True)
class QuantityCounts:
    """Counts of independent quantities under one kind of evidence."""

    tested: int
    hold: int
    """Quantities whose cells all agree."""
    possible: int = 0
    """Quantities whose cells all agree or are in the interval from unknown inputs."""


def count_independent(results: Sequence[ClaimResult], possible: bool = False) -> dict[str, QuantityCounts]:
    """Return the counts by kind of evidence, and under `ledger.ITSELF` those of sources against themselves.

    `possible`: include quantities whose tests have not run; these do not hold.
    """
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
    """Return the quantities that the value of `finding` reads."""
    if finding.itself:
        return [(result.claim.id, finding.expression)]
    expression = parse(finding.expression)
    if finding.kind == "analytic":
        return [
            (FORMULA_OF_FUNCTION.get(name, name),)
            for name in expression.calls & (PAPER_FUNCTIONS | SCRIPT_COUNTS.keys())
        ]
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
    """Return one quantity for each search or pair of runs that an expression finds by its conditions."""
    calls = [node for node in ast.walk(expression.tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in DEVICE_FUNCTIONS]
    return [("one device", *sorted(map(ast.unparse, call.keywords))) for call in named]


def _quantity(experiment: str, metric: str) -> Quantity:
    """Return the quantity that a metric of an experiment belongs to."""
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
