"""Where the evidence for a row gets its inputs, decided from its expression.

A value that comes from sizes through a formula of a paper is a `closed form`, one that a simulated step gave a
`trace`, one that real processes gave a `run`, and one that is read off the scripts of this repository a `count`.
Everything else is `the source against itself`: arithmetic on columns and literals, a printed or digitised number, a
published rate typed as a float, a formula held against a value that we derived from it, and a row of which the ledger
says that its answer is `given`.  That shows that a source is consistent and no more.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from repro.claims.expression import Expression, Uncertain, arguments, literals
from repro.claims.formulas import FORMULAS
from repro.claims.ledger import CLOSED_FORM, COUNT, ITSELF, Row
from repro.claims.published import UNITS
from repro.claims.scripts import COUNTS
from repro.claims.tolerance import COUNTED

ARITHMETIC = frozenset({"rounded", "mean", "sqrt"})
"""Functions that an expression may call and that are no formula of a paper."""
EVALUATED = "evaluated"
"""The function that reads scores of weights, which no suite has."""
PAPERS = FORMULAS.keys() - ARITHMETIC
PLAIN = frozenset({0.0, 1.0, 2.0})
"""Numbers that every formula has: one layer, two bytes an element."""
RATES = frozenset({"TFLOP/s", "PFLOP/s", "EFLOP", "PFLOP/s-days"})
"""Units of results so large that an equal literal is that result and no size."""


VOCABULARIES = frozenset({0.0, 50257.0, 50304.0, 51200.0, 53248.0})
"""Vocabularies that a source has: GPT-2's, with its two paddings, and Yuan's file, padded.  0: none is counted."""


def closed_form(
    expression: Expression,
    variables: Mapping[str, Any],
    certainty: str,
    published: float | None,
    unit: str,
    rates: frozenset[float],
) -> str:
    """`CLOSED_FORM`, `COUNT` or `ITSELF`, for an analytic expression.

    `published`: in base units.  `rates`: what is published in one of `RATES`, in base units.
    """
    if isinstance(expression.tree, ast.Call) and expression.calls <= COUNTS.keys():
        return COUNT
    if certainty == "derived" or not expression.calls & PAPERS:
        return ITSELF
    if expression.calls & {"printed", "digitised"} or rates.intersection(literals(expression)):
        return ITSELF
    if any(isinstance(variables.get(name), Uncertain) for name in expression.names):
        return ITSELF
    if _typed(expression, variables, published, unit) or not _vocabularies(expression) <= VOCABULARIES:
        return ITSELF
    return CLOSED_FORM


def circular(row: Row) -> str:
    """In which way a trace or a run shares an input with the published value, as far as its expression shows it.

    Empty where none does, or where the row says itself what is `given`.
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
        read = {f for f, texts in called if f == EVALUATED or "/" in "".join(texts)}
        if read <= {"setting"}:
            return "it reads nothing but settings of the suite"
        if read <= {"setting", "parameters"} and row.unit == "parameters":
            return "it reads nothing but the size of the suite's own model"
        if evidence.expect is None and _typed(evidence.value, row.variables, published, row.unit):
            return "the published value is typed in the expression, or a column of it"
    return ""


def _typed(expression: Expression, variables: Mapping[str, Any], published: float | None, unit: str) -> bool:
    """Whether the published value is among the inputs.

    Inside a formula, where sizes go, only a count or a size can be it: 7.5e9 parameters are not 7.5 GB.
    """
    outside = unit not in (*COUNTED, "parameters")
    typed = literals(expression, PAPERS if outside else frozenset())
    columns = [variables[name] for name in expression.names if name in variables] if not outside else []
    same = [number for number in (*typed, *columns) if number == published]
    return any(number not in PLAIN for number in same)


def _vocabularies(expression: Expression) -> frozenset[float]:
    """The vocabularies that are typed in a call of a formula that counts one."""
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
