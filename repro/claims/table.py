"""Verdicts of claims as plain data: counts for tables, all fields for JSON, sentences for displays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.ledger import CLOSED_FORM, ITSELF, KINDS, ONE_RANK, PUBLISHED_SCALE, SCALED_TWIN, Ledger
from repro.claims.verdicts import (
    BAD,
    DEPENDS,
    ERRATUM,
    FOLLOWS,
    GOOD,
    INCONSISTENT,
    NO_TEST,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    POSSIBLE,
    REPRODUCED,
    TESTED,
    VERDICTS,
    ClaimResult,
    Finding,
    InputUncertainty,
    RowResult,
)
from repro.results.schema import EMULATED, MEASURED


def summary(results: Sequence[ClaimResult]) -> dict[str, Any]:
    """Return counts of claims and published values by verdict and kind of evidence, and of tested quantities."""
    rows = [row for result in results for row in result.rows]
    quantities = count_independent(results)
    return {
        "claims": len(results),
        "rows": len(rows),
        "verdicts": {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS},
        "row_verdicts": {verdict: sum(r.verdict == verdict for r in rows) for verdict in VERDICTS},
        "evidence": {kind: _evidence(results, kind, quantities[kind]) for kind in KINDS},
        "against_itself": _evidence(results, ITSELF, quantities[ITSELF]),
        "quantities": {
            "tested": sum(quantities[kind].tested for kind in KINDS),
            "hold": sum(quantities[kind].hold for kind in KINDS),
            "possible": sum(quantities[kind].possible for kind in KINDS),
        },
        "disagreements": sum(len(r.disagreements) for r in results),
    }


def _evidence(results: Sequence[ClaimResult], kind: str, quantities: QuantityCounts) -> dict[str, Any]:
    claims = [k for k in (result.kind(kind) for result in results) if k]
    rows = [found for result in results for row in result.rows if (found := row.under(kind))]
    decided = [found for found in rows if all(f.decided for f in found)]
    return {
        "claims": len(claims),
        "verdicts": {verdict: sum(k.verdict == verdict for k in claims) for verdict in VERDICTS},
        "rows": len(rows),
        "rows_decided": len(decided),
        "rows_reproduced": sum(all(f.verdict in GOOD for f in found) for found in decided),
        "quantities": quantities.tested,
        "rows_possible": sum(any(f.verdict == POSSIBLE for f in found) for found in decided),
        "quantities_hold": quantities.hold,
    }


def totals(results: Sequence[ClaimResult]) -> str:
    """Return a text that counts published values by kind of test and by verdict; README and commands quote the text."""
    rows = [row for result in results for row in result.rows]
    count = Counter(row.verdict for row in rows)
    tested = [row.basis for row in rows if row.verdict in TESTED]
    kinds = ", ".join(f"{sum(basis.startswith(kind) for basis in tested)} {kind}" for kind in KINDS[1:])
    counted = sum(basis.startswith(KINDS[0]) for basis in tested)
    return (
        f"{len(rows)} values: {kinds}, {counted} in closed form; {count[REPRODUCED]} agree "
        f"({sum(bool(row.weakness) for row in rows)} weak), {count[NOT_REPRODUCED]} miss, "
        f"{count[POSSIBLE] + count[DEPENDS]} undecided. Untested: {count[FOLLOWS]} follow from formulas, "
        f"{count[INCONSISTENT] + count[ERRATUM]} contradict them, {count[NOT_RUN]} not run, "
        f"{count[NO_TEST] + count[NOT_COMPARABLE]} without a test."
    )


_WORDS = {
    f"measured, {PUBLISHED_SCALE}": "measured at the published scale",
    f"measured, {ONE_RANK}": "measured on one rank of the published layout",
    f"measured, {SCALED_TWIN}": "measured on scaled-down twins, against the formula at their scale",
    EMULATED: "measured on scaled-down twins with an emulated network",
    "simulated": "simulated at the published scale",
    "analytic": "counted lines of the example scripts",
    CLOSED_FORM: "the formula of the source",
    ITSELF: "other numbers of the same source",
}


def why(result: ClaimResult) -> str:
    """Return a sentence that explains the verdict about a claim by its evidence."""
    main = [row for row in result.rows if row.row.main]
    by = "; ".join(text for start, text in _WORDS.items() if any(row.basis.startswith(start) for row in main))
    total = len(main)
    every = "The only value agrees" if total == 1 else f"All {total} values agree"
    if result.verdict == NOT_COMPARABLE:
        return f"No published value can be compared: {result.reason.rstrip('.')}."
    if result.verdict in (NOT_RUN, NO_TEST):
        count = sum(row.verdict == result.verdict for row in main)
        state = "have a test that was not run" if result.verdict == NOT_RUN else "have no test"
        return f"{count} of {total} values {state}."
    if result.verdict == DEPENDS:
        count = sum(row.verdict == DEPENDS for row in main)
        return (
            f"For {count} of {total} values, the verdict depends on a condition that is not published ({by})."
        )
    if result.verdict == NOT_REPRODUCED:
        if total == 1:
            return f"The tested value misses the published one ({by})."
        return f"{sum(row.verdict in BAD for row in main)} of {total} values miss the published one ({by})."
    if result.verdict in BAD:
        count = sum(row.verdict in BAD for row in main)
        return f"{count} of {total} values contradict other numbers of the same source."
    if result.verdict == POSSIBLE:
        agree, count = (sum(row.verdict in some for row in main) for some in (GOOD, (POSSIBLE,)))
        return f"{agree} of {total} values agree; uncertain inputs explain the miss of {count} more ({by})."
    if result.verdict == FOLLOWS:
        return f"{every} with {by}. This checks the printed number without a run or a simulation."
    counts = count_independent([replace(result, rows=tuple(main))])
    tests = sum(found.tested for kind, found in counts.items() if kind != ITSELF)
    return f"{every} ({by}; independent tests: {tests})."


def as_dict(result: ClaimResult, ledger: Ledger) -> dict[str, Any]:
    """Return one claim with its verdict, published values and evidence as JSON data."""
    claim = result.claim
    return {
        **_fields(claim, "id", "title", "family", "file"),
        "about": ledger.about[claim.file],
        **_fields(claim, "published", "conditions"),
        "source": [
            {"key": key, "place": place, **_fields(ledger.sources[key], "title", "where")}
            for key, _, place in (text.partition(" ") for text in claim.source)
        ],
        **_fields(claim, "certainty", "predicted_blind", "contradictions", "note", "needs"),
        **_fields(result, "verdict", "basis", "reason"),
        "why": why(result),
        "disagreements": list(result.disagreements),
        "evidence": [
            {
                **_fields(kind, "kind", "scale", "verdict", "rows"),
                "rows_decided": kind.decided,
                "rows_reproduced": kind.reproduced,
            }
            for kind in result.kinds
        ],
        "rows": [_row(row) for row in result.rows],
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    """Return the named fields of an object as JSON data, with infinity as text, because JSON has no infinity."""
    return {name: _json(getattr(of, name)) for name in names}


def count_text(result: ClaimResult, name: str) -> str:
    """Return a claim's agreeing / testable values under one kind of evidence as text, such as `54/54`.

    Return `not run` for missing records, and a dash without such evidence. Measured evidence is also `not run` if the
    ledger names the hardware for a measurement, but no expression that reads the measurement.
    """
    kind, claim = result.kind(name), result.claim
    if kind and kind.decided:
        return f"{kind.reproduced}/{kind.rows}"
    is_wanted = name == MEASURED and bool(claim.needs) and result.verdict != NOT_COMPARABLE
    return NOT_RUN if kind or is_wanted else "-"


def _row(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {
        **_fields(row, "label", "published"),
        "value": None if row.printed is None else row.printed.value,
        **_fields(row, "unit", "statement", "bound", "error", "metric", "certainty"),
        **_fields(result, "verdict", "basis", "reason"),
        **_fields(row, "needs", "not_comparable", "calibrates", "main", "given"),
        "blind": None if row.blind is None else row.blind.value,
        "note": row.note,
        **_fields(result, "margin", "mutations", "weakness"),
        "evidence": [_finding(finding) for finding in result.findings],
        "disagreements": len(result.disagrees),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "scale": finding.scale_label,
        **_fields(finding, "reading", "measured_on", "is_reference", "origin", "value", "low", "high"),
        **_fields(finding, "expected", "tolerance", "verdict", "reason", "expression"),
        "moved_by": _moved(finding.uncertainty),
    }


MOVES = 5
"""Maximum number of uncertain inputs listed for a simulated value, largest effect first."""


def _moved(uncertainty: InputUncertainty | None) -> list[dict[str, Any]]:
    """Return a simulated value at both ends of each uncertain input's range, other inputs at their best values."""
    alone = {} if uncertainty is None else uncertainty.alone
    return [{"key": key, "low": low, "high": high} for key, (low, high) in list(alone.items())[:MOVES]]


def _json(value: Any) -> Any:
    """Return infinity as text and a tuple as a list, because JSON has neither, and any other value unchanged."""
    if isinstance(value, tuple):
        return [_json(one) for one in value]
    return value if not isinstance(value, float) or abs(value) != float("inf") else str(value)
