"""The judged ledger as the page shows it: a line a claim, and behind it every row with all its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.claims.judge import ClaimResult, Finding, KindResult, RowResult
    from repro.claims.ledger import Ledger

SIGNS = {"reproduced": "✓", "not reproduced": "✗", "not comparable": "≠", "not run": "○"}
"""A verdict is never told by colour alone."""


def slug(verdict: str) -> str:
    """A verdict as a CSS class."""
    return verdict.replace(" ", "-")


def claim_view(result: ClaimResult, ledger: Ledger) -> dict[str, Any]:
    """Everything that the page says about one claim."""
    from repro.claims.judge import experiments
    from repro.claims.ledger import CERTAINTIES, KINDS

    claim = result.claim
    names = [
        name
        for row in claim.rows
        for evidence in row.evidence
        if evidence.kind != "analytic"
        for part in (evidence.value, evidence.expect)
        if part
        for name in experiments(part, row.variables)
    ]
    return {
        "id": claim.id,
        "title": claim.title,
        "family": claim.family,
        "group": ledger.titles.get(claim.file, claim.file),
        "published": claim.published,
        "conditions": claim.conditions,
        "sources": [_source(text, ledger) for text in claim.source],
        "certainty": claim.certainty,
        "certainty_meaning": CERTAINTIES[claim.certainty],
        "contradictions": claim.contradictions,
        "note": claim.note,
        "needs": claim.needs,
        "verdict": result.verdict,
        "slug": slug(result.verdict),
        "sign": SIGNS[result.verdict],
        "basis": result.basis,
        "strongest": result.basis.partition(",")[0].split(" ")[0] if result.basis else "",
        "reason": result.reason,
        "disagreements": result.disagreements,
        "cells": {kind: _cell(result, result.kind(kind)) for kind in KINDS},
        "rows": [_row(row) for row in result.rows],
        "experiments": list(dict.fromkeys(names)),
    }


def _cell(result: ClaimResult, kind: KindResult | None) -> dict[str, str] | None:
    """One kind of evidence for a claim: its value if there is just one, else how many rows it reproduces."""
    if kind is None:
        return None
    values = [(row, f) for row in result.rows for f in row.findings if f.kind == kind.kind]
    if kind.decided == 0:
        words = "not run"
    elif kind.rows == 1 and len(values) == 1:
        row, finding = values[0]
        words = _with_unit(finding.text, row.row.unit)
    else:
        words = f"{kind.reproduced} of {kind.rows}"
        if 0 < kind.decided < kind.rows:
            words += f" ({kind.rows - kind.decided} not run)"
    # A count of rows that all ran is no failure only because others did not run.
    shown = kind.verdict
    if shown == "not run" and kind.decided:
        shown = "reproduced" if kind.reproduced == kind.decided else "not reproduced"
    return {"text": words, "scale": kind.scale, "verdict": shown, "slug": slug(shown), "sign": SIGNS[shown]}


def _row(result: RowResult) -> dict[str, Any]:
    row = result.row
    published = f"{row.bound} {row.published}".strip()
    return {
        "label": row.label,
        "published": _with_unit(published, row.unit) + (f" ± {row.error:g}" if row.error else ""),
        "certainty": row.certainty,
        "verdict": result.verdict,
        "slug": slug(result.verdict),
        "sign": SIGNS[result.verdict],
        "reason": result.reason,
        "note": row.note,
        "findings": [_finding(finding, result) for finding in result.findings],
    }


def _finding(finding: Finding, result: RowResult) -> dict[str, Any]:
    value = _with_unit(finding.text, result.row.unit) if finding.decided else "not run"
    return {
        "kind": finding.kind,
        "scale": finding.scale,
        "value": value,
        "reason": finding.reason,
        "expression": finding.expression,
        "verdict": finding.verdict,
        "slug": slug(finding.verdict),
        "sign": SIGNS[finding.verdict],
        "disagrees": finding in result.disagrees,
    }


def _with_unit(text: str, unit: str) -> str:
    """``31.4 GB``, ``44.8%``, ``4x``; nothing twice."""
    if not unit or text.endswith(unit):
        return text
    return f"{text}{unit}" if unit in ("x", "%") else f"{text} {unit}"


def _source(text: str, ledger: Ledger) -> dict[str, str]:
    """A citation with the title of what it cites."""
    key = text.split(" ")[0]
    source = ledger.sources.get(key)
    return {"text": text, "title": f"{source.title}; {source.where}" if source else ""}


def summary(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number of claims by verdict, and among them by the strongest evidence that decided."""
    counts = []
    for verdict, sign in SIGNS.items():
        members = [claim for claim in claims if claim["verdict"] == verdict]
        by_kind = {
            kind: sum(claim["strongest"] == kind for claim in members)
            for kind in ("measured", "simulated", "analytic")
        }
        if verdict not in ("reproduced", "not reproduced"):
            by_kind = {}
        counts.append(
            {
                "verdict": verdict,
                "slug": slug(verdict),
                "sign": sign,
                "count": len(members),
                "by_kind": by_kind,
            }
        )
    return counts
