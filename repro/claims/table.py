"""Judged claims as plain data: one line per claim for tables, everything for JSON.  No rendering here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from repro.claims.ledger import KINDS, Ledger
from repro.claims.results import (
    NOT_COMPARABLE,
    NOT_RUN,
    VERDICTS,
    ClaimResult,
    Finding,
    KindResult,
    RowResult,
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One claim in one line."""

    id: str
    title: str
    family: str
    file: str
    published: str
    certainty: str
    analytic: str
    """`54/54`: rows reproduced of rows that this kind of evidence can test; `not run`; or `-`."""
    simulated: str
    measured: str
    scale: str
    """Of the measured evidence; empty where nothing was measured."""
    verdict: str
    basis: str
    """What the verdict rests on, strongest first, with rows reproduced of all comparable rows."""
    reason: str
    needs: str
    disagreements: tuple[str, ...]


def table(results: Sequence[ClaimResult]) -> list[Line]:
    """One line per claim, in the ledger's order."""
    return [_line(result) for result in results]


def summary(results: Sequence[ClaimResult]) -> dict[str, Any]:
    """Counts: claims and rows by verdict, and by kind of evidence."""
    rows = [row for result in results for row in result.rows]
    evidence = {}
    for kind in KINDS:
        found = [k for k in (result.kind(kind) for result in results) if k]
        evidence[kind] = {
            "claims": len(found),
            "verdicts": {verdict: sum(k.verdict == verdict for k in found) for verdict in VERDICTS},
            "rows": sum(k.rows for k in found),
            "rows_decided": sum(k.decided for k in found),
            "rows_reproduced": sum(k.reproduced for k in found),
        }
    return {
        "claims": len(results),
        "rows": len(rows),
        "verdicts": {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS},
        "row_verdicts": {verdict: sum(r.verdict == verdict for r in rows) for verdict in VERDICTS},
        "evidence": evidence,
        "disagreements": sum(len(r.disagreements) for r in results),
    }


def as_dict(result: ClaimResult, ledger: Ledger) -> dict[str, Any]:
    """One claim with every field, row and piece of evidence, ready for JSON."""
    claim = result.claim
    return {
        "id": claim.id,
        "title": claim.title,
        "family": claim.family,
        "file": claim.file,
        "about": ledger.about[claim.file],
        "published": claim.published,
        "conditions": claim.conditions,
        "source": [
            {
                "key": key,
                "place": place,
                "title": ledger.sources[key].title,
                "where": ledger.sources[key].where,
            }
            for key, _, place in (text.partition(" ") for text in claim.source)
        ],
        "certainty": claim.certainty,
        "contradictions": list(claim.contradictions),
        "note": claim.note,
        "needs": claim.needs,
        "verdict": result.verdict,
        "basis": result.basis,
        "reason": result.reason,
        "disagreements": list(result.disagreements),
        "evidence": [
            {
                "kind": kind.kind,
                "scale": kind.scale,
                "verdict": kind.verdict,
                "rows": kind.rows,
                "rows_decided": kind.decided,
                "rows_reproduced": kind.reproduced,
            }
            for kind in result.kinds
        ],
        "rows": [_row(row) for row in result.rows],
    }


def _line(result: ClaimResult) -> Line:
    claim = result.claim
    measured = result.kind("measured")
    return Line(
        id=claim.id,
        title=claim.title,
        family=claim.family,
        file=claim.file,
        published=claim.published,
        certainty=claim.certainty,
        analytic=_count(result.kind("analytic")),
        simulated=_count(result.kind("simulated")),
        measured=_count(measured, wanted=bool(claim.needs) and result.verdict != NOT_COMPARABLE),
        scale=measured.scale if measured and measured.decided else "",
        verdict=result.verdict,
        basis=result.basis,
        reason=result.reason,
        needs=claim.needs,
        disagreements=result.disagreements,
    )


def _count(kind: KindResult | None, wanted: bool = False) -> str:
    """`wanted`: no expression tests it yet, but the ledger says what would."""
    if kind and kind.decided:
        return f"{kind.reproduced}/{kind.rows}"
    return NOT_RUN if kind or wanted else "-"


def _row(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {
        "label": row.label,
        "published": row.published,
        "value": None if row.printed is None else row.printed.value,
        "unit": row.unit,
        "bound": row.bound,
        "error": row.error,
        "metric": row.metric,
        "certainty": row.certainty,
        "verdict": result.verdict,
        "basis": result.basis,
        "reason": result.reason,
        "needs": row.needs,
        "not_comparable": row.not_comparable,
        "calibrates": row.calibrates,
        "note": row.note,
        "evidence": [_finding(finding) for finding in result.findings],
        "disagreements": len(result.disagrees),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "scale": finding.scale,
        "value": _json(finding.value),
        "low": _json(finding.low),
        "high": _json(finding.high),
        "expected": _json(finding.expected),
        "tolerance": finding.tolerance,
        "verdict": finding.verdict,
        "reason": finding.reason,
        "expression": finding.expression,
    }


def _json(value: Any) -> Any:
    """JSON has no infinity."""
    return value if not isinstance(value, float) or abs(value) != float("inf") else str(value)
