"""The judged ledger as text for the page: one line per claim, and every row with all its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.claims.ledger import CERTAINTIES, CLOSED_FORM, ITSELF, KINDS, PUBLISHED_SCALE
from repro.claims.published import append_unit
from repro.claims.run_commands import device_commands, evaluation_commands, experiments_of
from repro.claims.table import count_text, why
from repro.claims.verdicts import (
    BAD,
    CONSISTENT,
    INCONSISTENT,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    POSSIBLE,
    REPRODUCED,
)
from repro.util import units

if TYPE_CHECKING:
    from repro.claims.ledger import Claim, Ledger
    from repro.claims.run_commands import SuiteCatalogue
    from repro.claims.verdicts import ClaimResult, Finding, InputUncertainty, RowResult

VERDICT_SIGNS = {
    REPRODUCED: "✓",
    POSSIBLE: "?",
    NOT_REPRODUCED: "✗",
    CONSISTENT: "≈",
    INCONSISTENT: "≉",
    NOT_COMPARABLE: "≠",
    NOT_RUN: "○",
}
"""Sign of each verdict, because colour alone must not distinguish verdicts."""


def anchor(kind: str, name: str) -> str:
    """Return the anchor of the record `suite/name` in `experiments.html`."""
    return f"{'sim' if kind == 'simulated' else 'run'}-{name.replace('/', '.').replace(' ', '-')}"


def claim_view(result: ClaimResult, ledger: Ledger, catalogue: SuiteCatalogue) -> dict[str, Any]:
    """Return all data that the page shows about one claim."""
    claim = result.claim
    read = list(dict.fromkeys([*experiments_of(claim.rows), *_measured_at_published_scale(result)]))
    return {
        "id": claim.id,
        "title": claim.title,
        "file": claim.file,
        "published": claim.published,
        "conditions": claim.conditions,
        "sources": [_source(text, ledger) for text in claim.source],
        "certainty": claim.certainty,
        "certainty_meaning": CERTAINTIES[claim.certainty],
        "predicted": claim.prediction,
        "contradictions": claim.contradictions,
        "note": claim.note,
        "needs": claim.needs,
        "verdict": result.verdict,
        "basis": result.basis,
        "kinds": [kind.kind for kind in result.kinds if kind.decided and kind.kind in KINDS] or ["none"],
        "why": why(result),
        "reason": result.reason,
        "disagreements": result.disagreements,
        "cells": {kind: _cell(result, kind) for kind in (*KINDS, ITSELF)},
        "rows": [row_view(row, claim) for row in result.rows],
        "experiments": [{"name": name, "kind": kind, "anchor": anchor(kind, name)} for kind, name in read],
        "commands": [*catalogue.commands(read), *evaluation_commands(claim), *device_commands(claim)],
    }


def _measured_at_published_scale(result: ClaimResult) -> list[tuple[str, str]]:
    """Return the experiments that the ledger lists as simulated and the store also has as measured."""
    return [
        (finding.kind, name)
        for row in result.rows
        for finding in row.findings
        if finding.kind == "measured" and finding.scale == PUBLISHED_SCALE
        for name in finding.experiments
    ]


def _cell(result: ClaimResult, name: str) -> dict[str, str]:
    """Return the cell of one kind of evidence for a claim: a single value, or the count of the ledger table."""
    words = count_text(result, name)
    kind = result.kind(name)
    if kind is None or kind.decided == 0:
        return {"text": words, "scale": "", "verdict": ""}
    values = [(f, row) for row in result.rows if row.row.main for f in row.under(name)]
    if name == ITSELF:
        shown = CONSISTENT if kind.reproduced == kind.decided else INCONSISTENT
    else:
        if len(values) == 1:
            words = _value(*values[0])
        elif kind.decided < kind.rows:
            words += f" ({kind.rows - kind.decided} not run)"
        # Missing runs alone are not a failure if all executed rows agree.
        missed = any(f.verdict in BAD for f, _ in values)
        shown = REPRODUCED if kind.reproduced == kind.decided else NOT_REPRODUCED if missed else POSSIBLE
    return {"text": words, "scale": kind.scale if kind.scale != CLOSED_FORM else "", "verdict": shown}


def row_view(result: RowResult, claim: Claim) -> dict[str, Any]:
    """Return one published value with all its evidence, strongest first, with every number as text."""
    row = result.row
    published = f"{row.bound} {row.published}".strip()
    if row.printed is not None:
        published = append_unit(published, row.unit)
    return {
        "label": row.label,
        "published": published + (f" ± {row.error:g}" if row.error else ""),
        "certainty": row.certainty,
        "verdict": result.verdict,
        "reason": "" if result.reason == claim.needs or result.findings else result.reason,
        "note": row.note,
        "given": row.given,
        "blind": append_unit(row.blind.text, row.unit) if row.blind else "",
        "main": row.main,
        "findings": [_finding(finding, result) for finding in result.findings],
    }


def _finding(finding: Finding, result: RowResult) -> dict[str, Any]:
    at_scale = finding.decided and isinstance(finding.expected, int | float)
    return {
        "kind": finding.kind,
        "scale": finding.scale_label,
        "origin": finding.origin,
        "machine": finding.machine if finding.decided else "",
        "itself": finding.itself,
        "value": "not run" if finding.value is None else _value(finding, result),
        "number": "" if finding.value is None else f"{finding.value}",
        "tolerance": finding.reason if at_scale else finding.tolerance,
        "reason": "" if at_scale else _beside_the_rule(finding),
        "expression": finding.expression,
        "verdict": finding.verdict,
        "disagrees": finding in result.disagrees,
        "tornado": tornado(finding.doubt) if finding.doubt is not None else [],
    }


MAX_TORNADO_BARS = 5
"""Maximum number of unknowns in a tornado diagram, by descending effect."""


def tornado(doubt: InputUncertainty) -> list[dict[str, Any]]:
    """Return one bar per unknown: the range of a value as this unknown alone varies.

    `left` and `width` are percentages of the common span of all bars. `best` is the position of the value at the best
    numbers.
    """
    shown = doubt.largest_unknowns(MAX_TORNADO_BARS)
    ends = [end for _, low, high, _ in shown for end in (low, high)] + [doubt.best]
    start, span = min(ends), (max(ends) - min(ends)) or 1.0

    def place(value: float) -> float:
        return round(100 * (value - start) / span, 1)

    return [
        {
            "key": key,
            "least": units.number(min(low, high)),
            "most": units.number(max(low, high)),
            "ends": f"{units.number(low)} at the low end of its range, {units.number(high)} at the high end",
            "left": place(min(low, high, doubt.best)),
            "width": round(place(max(low, high, doubt.best)) - place(min(low, high, doubt.best)), 1),
            "best": place(doubt.best),
            "share": units.percent(share),
        }
        for key, low, high, share in shown
    ]


def _beside_the_rule(finding: Finding) -> str:
    """Return the reason without the rule that ends the tolerance: missing records, or the effect of an interval."""
    rule = finding.tolerance.partition(": ")[2]
    return finding.reason.removeprefix(rule).removeprefix("; ") if rule else finding.reason


def _value(finding: Finding, result: RowResult) -> str:
    """Return the value as text, with the row's unit if it is a number."""
    return finding.text if isinstance(finding.value, str) else append_unit(finding.text, result.row.unit)


def _source(text: str, ledger: Ledger) -> dict[str, str]:
    """Return a citation with the title of the cited source."""
    key = text.split(" ")[0]
    source = ledger.sources.get(key)
    return {"text": text, "title": f"{source.title}; {source.where}" if source else ""}


def count_verdicts(claims: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of claims of each verdict that occurs."""
    found = [claim["verdict"] for claim in claims]
    return {verdict: found.count(verdict) for verdict in VERDICT_SIGNS if verdict in found}
