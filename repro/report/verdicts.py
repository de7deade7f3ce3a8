"""The judged ledger as the page shows it: a line a claim, and behind it every row with all its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.claims.ledger import CERTAINTIES, CLOSED_FORM, ITSELF, KINDS, PUBLISHED_SCALE
from repro.claims.published import append_unit
from repro.claims.run_commands import evaluation_commands
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
    from repro.claims.table import Line
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
"""A verdict is never told by colour alone."""


def slug(verdict: str) -> str:
    """A verdict as a CSS class."""
    return verdict.replace(" ", "-")


def anchor(kind: str, name: str) -> str:
    """Where the page has the record of the experiment `suite/name`."""
    return f"{'sim' if kind == 'simulated' else 'run'}-{name.replace('/', '.')}"


def claim_view(result: ClaimResult, line: Line, ledger: Ledger, catalogue: SuiteCatalogue) -> dict[str, Any]:
    """Everything that the page says about one claim."""
    claim = result.claim
    read = list(dict.fromkeys([*experiments_of(claim), *_measured_at_published_scale(result)]))
    return {
        "id": claim.id,
        "title": claim.title,
        "family": claim.family,
        "about": ledger.about.get(claim.file, claim.file),
        "group": ledger.titles.get(claim.file, claim.file),
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
        "slug": slug(result.verdict),
        "sign": VERDICT_SIGNS[result.verdict],
        "basis": result.basis,
        "strongest": next((kind for kind in KINDS if result.basis.startswith(kind)), ""),
        "kinds": [kind.kind for kind in result.kinds if kind.decided and kind.kind in KINDS] or ["none"],
        "why": line.why,
        "reason": result.reason,
        "disagreements": result.disagreements,
        "cells": {**{kind: _cell(result, line, kind) for kind in KINDS}, "itself": _itself(result, line)},
        "rows": [row_view(row, claim) for row in result.rows],
        "experiments": [{"name": name, "kind": kind, "anchor": anchor(kind, name)} for kind, name in read],
        "commands": [*catalogue.commands(read), *evaluation_commands(claim)],
    }


def experiments_of(claim: Claim) -> list[tuple[str, str]]:
    """Kind of evidence and `suite/name` of every experiment that a claim reads, each once."""
    from repro.claims.judge import experiments_read

    read = [
        (evidence.kind, name)
        for row in claim.rows
        for evidence in row.evidence
        if evidence.kind != "analytic"
        for part in (evidence.value, evidence.expect)
        if part
        for name in experiments_read(part, row.variables)
    ]
    return list(dict.fromkeys(read))


def _measured_at_published_scale(result: ClaimResult) -> list[tuple[str, str]]:
    """Experiments that the ledger has as simulated only, and that the store has as measured too."""
    return [
        (finding.kind, name)
        for row in result.rows
        for finding in row.findings
        if finding.kind == "measured" and finding.scale == PUBLISHED_SCALE
        for name in finding.experiments
    ]


def _cell(result: ClaimResult, line: Line, name: str) -> dict[str, str]:
    """One kind of evidence for a claim: its value if there is just one, else the ledger table's count."""
    words = line.counts[name]
    kind = result.kind(name)
    if kind is None or kind.decided == 0:
        return {"text": words, "scale": "", "verdict": words, "slug": "", "sign": ""}
    values = [(f, row) for row in result.rows if row.row.main for f in row.under(name)]
    if len(values) == 1:
        words = _value(*values[0])
    elif kind.decided < kind.rows:
        words += f" ({kind.rows - kind.decided} not run)"
    # Rows that all ran and agree are no failure only because others did not run.
    missed = any(f.verdict in BAD for f, _ in values)
    shown = REPRODUCED if kind.reproduced == kind.decided else NOT_REPRODUCED if missed else POSSIBLE
    scale = "" if kind.scale == CLOSED_FORM else kind.scale
    return {
        "text": words,
        "scale": scale,
        "verdict": shown,
        "slug": slug(shown),
        "sign": VERDICT_SIGNS[shown],
    }


def _itself(result: ClaimResult, line: Line) -> dict[str, str]:
    """How many values are consistent with other numbers of their source."""
    kind = result.kind(ITSELF)
    if kind is None or kind.decided == 0:
        return {"text": line.itself, "scale": "", "verdict": line.itself, "slug": "", "sign": ""}
    shown = CONSISTENT if kind.reproduced == kind.decided else INCONSISTENT
    return {
        "text": line.itself,
        "scale": "",
        "verdict": shown,
        "slug": slug(shown),
        "sign": VERDICT_SIGNS[shown],
    }


def row_view(result: RowResult, claim: Claim) -> dict[str, Any]:
    """One published value with all its evidence, strongest first, every number as text."""
    row = result.row
    published = f"{row.bound} {row.published}".strip()
    if row.printed is not None:
        published = append_unit(published, row.unit)
    return {
        "label": row.label,
        "published": published + (f" ± {row.error:g}" if row.error else ""),
        "certainty": row.certainty,
        "verdict": result.verdict,
        "slug": slug(result.verdict),
        "sign": VERDICT_SIGNS[result.verdict],
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
        "itself": finding.itself,
        "value": "not run" if finding.value is None else _value(finding, result),
        "number": "" if finding.value is None else f"{finding.value}",
        "tolerance": finding.reason if at_scale else finding.tolerance,
        "reason": "" if at_scale else _beside_the_rule(finding),
        "expression": finding.expression,
        "verdict": finding.verdict,
        "slug": slug(finding.verdict),
        "sign": VERDICT_SIGNS[finding.verdict],
        "disagrees": finding in result.disagrees,
        "tornado": tornado(finding.doubt) if finding.doubt is not None else [],
    }


MAX_TORNADO_BARS = 5
"""Unknowns of a tornado, those that move the value most."""


def tornado(doubt: InputUncertainty) -> list[dict[str, Any]]:
    """What each unknown alone makes of a value: a bar from one end to the other, as parts of the widest span of all.

    `left` and `width` in percent; `best`: where the value at the best numbers lies.
    """
    shown = doubt.largest_unknowns(MAX_TORNADO_BARS)
    ends = [end for _, low, high, _ in shown for end in (low, high)] + [doubt.best]
    start, whole = min(ends), (max(ends) - min(ends)) or 1.0

    def place(value: float) -> float:
        return round(100 * (value - start) / whole, 1)

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
    """The reason without the rule, which the tolerance ends with: what is missing, what an interval says."""
    rule = finding.tolerance.partition(": ")[2]
    return finding.reason.removeprefix(rule).removeprefix("; ") if rule else finding.reason


def _value(finding: Finding, result: RowResult) -> str:
    """The value for a person, with the row's unit if it is a number."""
    return finding.text if isinstance(finding.value, str) else append_unit(finding.text, result.row.unit)


def _source(text: str, ledger: Ledger) -> dict[str, str]:
    """A citation with the title of what it cites."""
    key = text.split(" ")[0]
    source = ledger.sources.get(key)
    return {"text": text, "title": f"{source.title}; {source.where}" if source else ""}


def count_verdicts(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number of claims by verdict, and among the decided by the strongest evidence that decided."""
    counts = []
    for verdict, sign in VERDICT_SIGNS.items():
        members = [claim for claim in claims if claim["verdict"] == verdict]
        kinds = KINDS[::-1] if verdict in (REPRODUCED, POSSIBLE, NOT_REPRODUCED) else ()
        by_kind = {kind: sum(claim["strongest"] == kind for claim in members) for kind in kinds}
        entry = {"verdict": verdict, "slug": slug(verdict), "sign": sign, "count": len(members)}
        counts.append({**entry, "by_kind": by_kind})
    return counts


def by_about(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of each system, how many there are of each verdict; the system with most claims first."""
    entries = [
        {
            "about": about,
            "claims": len(members),
            "verdicts": [
                {"verdict": verdict, "slug": slug(verdict), "sign": sign, "count": count}
                for verdict, sign in VERDICT_SIGNS.items()
                if (count := sum(claim["verdict"] == verdict for claim in members))
            ],
        }
        for about in dict.fromkeys(claim["about"] for claim in claims)
        for members in [[claim for claim in claims if claim["about"] == about]]
    ]
    return sorted(entries, key=lambda entry: -int(entry["claims"]))
