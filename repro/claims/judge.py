"""Verdicts of claims and of their rows (published values), computed from the ledger and from records.

Every test of a row gets its own verdict.  The strongest kind of evidence with a result decides the row (`_ORDER`).
Closed forms and other numbers of the source are no tests: they give `follows` or `inconsistent`, never `reproduced`.
While a test of the row has not run, they can only give `inconsistent`.  A claim's verdict is the first in
`DISAGREEING_FIRST` that one of its main rows has (rows that count for the verdict).
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
    """Return the verdicts about all claims of `ledger`. `references`: other machines' records where own are missing."""
    seen = Records(records, references)
    return [judge_claim(claim, seen) for claim in ledger.claims]


def judge_claim(claim: Claim, records: Records) -> ClaimResult:
    """Return the verdict about one published claim from records of experiments."""
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
            f"{row.row.label}: verdict {row.verdict} ({row.basis}), "
            f"but a weaker kind of evidence has the verdict {finding.verdict} ({_name(finding)})"
            for row in rows
            for finding in row.disagrees
        ),
    )


def weakest_verdict(rows: Sequence[RowResult]) -> str:
    """Return the common verdict about several published values: the first in `DISAGREEING_FIRST` that one value has."""
    return next(verdict for verdict in DISAGREEING_FIRST if any(row.verdict == verdict for row in rows))


DISAGREEING_FIRST = (*BAD, NOT_RUN, NO_TEST, DEPENDS, POSSIBLE, NOT_COMPARABLE, FOLLOWS, REPRODUCED)
"""All verdicts, disagreement first. A claim has the first verdict in this order that one of its counting values has."""
_ORDER = (
    *(f"measured, {scale}" for scale in (PUBLISHED_SCALE, ONE_RANK, SCALED_TWIN)),
    *KINDS[2::-1],
    CLOSED_FORM,
    ITSELF,
)
"""Kinds of evidence that can decide the verdict about a published value, strongest first."""


def strength_rank(basis: str) -> int:
    """Return the rank of a kind of evidence by strength; 0 is the strongest, a measurement at the published scale."""
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
                # While runs are missing, checks of the source's numbers against each other can only refute the claim.
                equals = [f for f in equals if f.verdict in BAD]
        # Several expressions may compute a published value from one kind of evidence, such as simulations. The verdict
        # is `not reproduced` if one of them misses the value. An agreement needs all of them.
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
    """Return the result of a published value; if `reproduced`, with margin and simulator faults that change it."""
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
    """Return the simulator faults that change a verdict, by claim and label of the value (`make mutation-table`)."""
    document = json.loads((Path(__file__).parent / "data/mutations.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, list[str]]] = document["claims"]
    return found


def _describe_differing_readings(findings: Sequence[Finding]) -> str:
    """Return value and verdict under each assumption about an unpublished condition; empty if the verdicts agree."""
    tested = [finding for finding in findings if finding.reading and finding.decided]
    if len({finding.verdict in BAD for finding in tested}) < 2:
        return ""
    return "; ".join(f"{finding.reading}: {finding.text}, {finding.verdict}" for finding in tested)


def _at_published_scale(row: Row, records: Records) -> Iterator[Evidence]:
    """Yield a measured test for each simulated test of a published value whose experiments have measured records.

    Simulated and measured records have the same experiments and metrics, so that one expression reads both.  The ratio
    of two experiments that one launch interleaved comes from their comparison record, which has an interval.
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
    """Return the experiments, as `suite/name`, whose records a test of a published value reads; empty for formulas."""
    return [] if evidence.kind == "analytic" else experiments_read(evidence.value, row.variables)


def _kind(name: str, rows: Sequence[RowResult]) -> KindResult | None:
    """Return verdict and counts of published values for evidence kind `name`; None if no value has such evidence."""
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
    """Return agreeing/tested published values as text, by kind of evidence: `measured, scaled twin 9/9; 2 not run`."""
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
    """Return the experiments whose records a ledger expression reads, as `suite/name`."""
    return sorted({text for text in texts(expression, variables) if "/" in text})
