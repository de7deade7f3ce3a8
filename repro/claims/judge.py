"""Verdicts of rows and claims, computed from the ledger and from records.

Every piece of evidence of a row gets its own verdict.  The strongest evidence that has been evaluated decides the row
(`_ORDER`).  Closed forms and other numbers of the source are no tests: they give `follows` or `inconsistent`, never
`reproduced`, and only `inconsistent` while a test of the row has not run.  A claim's verdict is the first in
`DISAGREEING_FIRST` that one of its main rows has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from repro.claims.evidence import evaluate_evidence
from repro.claims.expression import Expression, parse, quotient, texts
from repro.claims.ledger import (
    CLOSED_FORM,
    EMULATED,
    ITSELF,
    KINDS,
    ONE_RANK,
    PUBLISHED_SCALE,
    RUN,
    SCALED_TWIN,
    TRACE,
    Claim,
    Evidence,
    Ledger,
    Row,
)
from repro.claims.records import Records
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
    ClaimResult,
    Finding,
    KindResult,
    RowResult,
)
from repro.results.reference_records import ReferenceFile
from repro.results.schema import MEASURED, SIMULATED, Record


def judge(
    ledger: Ledger, records: Iterable[Record], references: Iterable[ReferenceFile] = ()
) -> list[ClaimResult]:
    """Return the verdict of every claim of `ledger`, in its order.

    `references`: records of other machines, used for measured values that `records` do not contain.
    """
    seen = Records(records, references)
    return [judge_claim(claim, seen) for claim in ledger.claims]


def judge_claim(claim: Claim, records: Records) -> ClaimResult:
    """Return the verdict of one claim from `records`."""
    rows = tuple(_judge_row(row, claim, records) for row in claim.rows)
    main = [row for row in rows if row.row.main]
    kinds = tuple(kind for kind in (_kind(name, main) for name in (*KINDS, ITSELF)) if kind)
    verdict = weakest_verdict(main)
    weakest = next(row for row in main if row.verdict == verdict)
    reason = weakest.reason
    if verdict in BAD:
        reason = weakest.row.note or reason
    elif verdict in GOOD:
        reason = weakest.row.given
    return ClaimResult(
        claim=claim,
        rows=rows,
        kinds=kinds,
        verdict=verdict,
        basis=_basis(main),
        reason=reason,
        disagreements=tuple(
            f"{row.row.label}: {row.verdict} ({row.basis}), but {finding.verdict} ({_name(finding)})"
            for row in rows
            for finding in row.disagrees
        ),
    )


def weakest_verdict(rows: Sequence[RowResult]) -> str:
    """Return the verdict of `rows` together: the first in `DISAGREEING_FIRST` that one of them has."""
    return next(verdict for verdict in DISAGREEING_FIRST if any(row.verdict == verdict for row in rows))


DISAGREEING_FIRST = (*BAD, NOT_RUN, NO_TEST, DEPENDS, POSSIBLE, NOT_COMPARABLE, FOLLOWS, REPRODUCED)
"""Verdicts by priority. The verdict of a claim is the first of them that one of its main rows has."""
_ORDER = (
    *(f"measured, {scale}" for scale in (PUBLISHED_SCALE, ONE_RANK, SCALED_TWIN)),
    *KINDS[2::-1],
    CLOSED_FORM,
    ITSELF,
)
"""Kinds of evidence that can decide a row, strongest first."""


def strength_rank(basis: str) -> int:
    """Return the position of a kind of evidence in `_ORDER`; 0 is the strongest."""
    return next(rank for rank, start in enumerate(_ORDER) if basis.startswith(start))


def _judge_row(row: Row, claim: Claim, records: Records) -> RowResult:
    evidence = [*row.evidence, *_at_published_scale(row, records)]
    findings = sorted(
        (evaluate_evidence(one, row, claim, records, _read(one, row)) for one in evidence),
        key=lambda f: strength_rank(_name(f)),
    )
    speaking = [f for f in findings if f.verdict != NOT_COMPARABLE]
    if differing := _describe_differing_readings(speaking):
        basis = next(_name(finding) for finding in speaking if finding.decided)
        return RowResult(row, tuple(findings), DEPENDS, basis, differing)
    for level in dict.fromkeys(strength_rank(_name(f)) for f in speaking):
        equals = [f for f in speaking if strength_rank(_name(f)) == level]
        if equals[0].itself:
            equals = [f for f in equals if f.decided] or equals
            if not all(f.itself for f in speaking):
                # Another test of this row has not run, so the source itself decides only if it is inconsistent.
                equals = [f for f in equals if f.verdict in BAD]
        # A row misses if one of its expressions misses; it agrees only if all expressions of the same kind agree.
        failed = next((f for f in equals if f.verdict in BAD), None)
        if failed or (equals and all(f.decided for f in equals)):
            best = failed or next((f for f in equals if f.verdict == POSSIBLE), equals[0])
            if row.erratum and best.verdict == INCONSISTENT:
                return RowResult(row, tuple(findings), ERRATUM, _name(best), row.erratum)
            return _with_margin(
                RowResult(row, tuple(findings), best.verdict, _name(best), best.reason), equals, claim
            )
    if row.not_comparable:
        return RowResult(row, tuple(findings), NOT_COMPARABLE, "", row.not_comparable)
    if not speaking:
        return RowResult(row, tuple(findings), NO_TEST, "", row.needs)
    return RowResult(row, tuple(findings), NOT_RUN, "", next(f.reason for f in speaking))


def _with_margin(result: RowResult, deciding: Sequence[Finding], claim: Claim) -> RowResult:
    """Return a `reproduced` result with its margin and the simulator faults that change it; others unchanged."""
    if result.verdict != REPRODUCED:
        return result
    margins = [one.margin for one in deciding if one.margin is not None]
    margin = (min(one[0] for one in margins), min(one[1] for one in margins)) if margins else None
    mutations = (
        load_mutations().get(claim.id, {}).get(result.row.label) if result.basis == SIMULATED else None
    )
    return replace(result, margin=margin, mutations=None if mutations is None else tuple(mutations))


@cache
def load_mutations() -> dict[str, dict[str, list[str]]]:
    """Return the simulator faults that change a verdict, by claim and row label, from `make mutation-table`."""
    document = json.loads((Path(__file__).parent / "data/mutations.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, list[str]]] = document["claims"]
    return found


def _describe_differing_readings(findings: Sequence[Finding]) -> str:
    """Return the value and the verdict under each tested reading; empty if the verdicts of the readings agree."""
    tested = [finding for finding in findings if finding.reading and finding.decided]
    if len({finding.verdict in BAD for finding in tested}) < 2:
        return ""
    return "; ".join(f"{finding.reading}: {finding.text}, {finding.verdict}" for finding in tested)


def _at_published_scale(row: Row, records: Records) -> Iterator[Evidence]:
    """Yield measured evidence for each simulated evidence whose experiments have measured records.

    Simulated and measured records have the same experiments and metrics, so that one expression reads both.  The ratio
    of two interleaved experiments comes from their comparison record, which has an interval.
    """
    tested = {experiment for one in row.evidence if one.kind == MEASURED for experiment in _read(one, row)}
    for one in row.evidence:
        read = _read(one, row)
        if one.kind != SIMULATED or not read or tested.intersection(read):
            continue
        origin = RUN if one.origin == TRACE else one.origin
        value = one.value
        turns = quotient(value, row.variables)
        for machine in (records, *records.references):
            if turns and machine.interleaved(*turns):
                value = parse(f'compared("{turns[0]}", "{turns[1]}")')
            elif not all(map(machine.measured, read)):
                continue
            yield replace(one, kind="measured", scale=PUBLISHED_SCALE, origin=origin, value=value)
            break


def _read(evidence: Evidence, row: Row) -> list[str]:
    """Return the experiments that the expression of evidence reads, as `suite/name`."""
    return [] if evidence.kind == "analytic" else experiments_read(evidence.value, row.variables)


def _kind(name: str, rows: Sequence[RowResult]) -> KindResult | None:
    """Return the verdict of one kind of evidence, or of `ITSELF`, on `rows`; None if it can test none of them."""
    tested = [found for row in rows if (found := row.under(name))]
    if not tested:
        return None
    decided = [found for found in tested if all(f.decided for f in found)]
    good = sum(all(f.verdict in GOOD for f in found) for found in decided)
    differing = [found for found in tested if _describe_differing_readings(found)]
    if any(f.verdict in BAD for found in tested if found not in differing for f in found):
        verdict = INCONSISTENT if name == ITSELF else NOT_REPRODUCED
    elif len(decided) < len(tested):
        verdict = NOT_RUN
    elif differing:
        verdict = DEPENDS
    elif any(f.verdict == POSSIBLE for found in tested for f in found):
        verdict = POSSIBLE
    else:
        verdict = FOLLOWS if name == ITSELF else REPRODUCED
    scales = dict.fromkeys(part for found in decided or tested for f in found for part in f.scale_parts)
    return KindResult(name, ", ".join(scales), verdict, good, len(decided), len(tested))


def _basis(rows: list[RowResult]) -> str:
    """Return agreeing of decided rows by evidence, then other rows: `measured, scaled twin 9/9; 2 not run`."""
    rest = Counter(row.basis for row in rows if row.basis)
    good = Counter(row.basis for row in rows if row.basis and row.verdict in GOOD)
    open_ = Counter(row.verdict for row in rows if rest and not row.basis)
    parts = [f"{name} {good[name]}/{rest[name]}" for name in sorted(rest, key=strength_rank)]
    return "; ".join([*parts, *(f"{count} {verdict}" for verdict, count in open_.items())])


def _name(finding: Finding) -> str:
    if finding.itself:
        return finding.origin
    if finding.kind == EMULATED:
        return ", ".join((finding.kind, *finding.libraries))
    return f"measured, {finding.scale_label}" if finding.kind == MEASURED else finding.kind


def experiments_read(expression: Expression, variables: Mapping[str, Any]) -> list[str]:
    """Return the experiments that an expression reads, as `suite/name`."""
    return sorted({text for text in texts(expression, variables) if "/" in text})
