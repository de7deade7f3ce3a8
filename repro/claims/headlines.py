"""Headline claims (best-known statements of the reports) as table lines: published value, tested values, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro.claims.expression import Value
from repro.claims.judge import weakest_verdict
from repro.claims.ledger import EMULATED, PUBLISHED_SCALE, Headline, Ledger
from repro.claims.published import append_unit, format_value
from repro.claims.verdicts import BAD, NOT_RUN, ClaimResult, Finding, RowResult
from repro.results.schema import MEASURED, SIMULATED
from repro.util import units

SHOWN_KINDS = (SIMULATED, EMULATED, MEASURED)
"""Kinds of evidence with a column in the table of headline claims (best-known statements of the reports)."""
OUTCOMES = {"ok": "fits", "oom": "does not fit"}
"""Displayed text for each outcome of an experiment."""
BOUND_SIGNS = {"over": ">", "at least": "≥", "under": "<", "at most": "≤"}
"""Comparison sign displayed before a published value, by the bound that the source states."""
REFERENCE_SUFFIX = " (packaged record of another machine)"
"""Suffix of a machine's name in tables, for a value from the packaged records of other machines."""
MAX_LISTED_VALUES = 3
"""Maximum number of values that a table cell lists; more values are displayed as a range."""


@dataclass(frozen=True)
class HeadlineLine:
    """Line of the table of headline claims (best-known statements of the reproduced reports)."""

    number: int
    """Number of the statement in the table of best-known claims, from 1; `repro claims NUMBER` shows the claim."""
    name: str
    claim: str
    published: str
    values: Mapping[str, str]
    """Displayed value by kind of evidence; `not run`, or a dash if the claim has no evidence of this kind."""
    verdict: str
    """Verdict about the published values that this table line selects from its claim, which may have more values."""
    machines: tuple[str, ...]
    """Devices that measured the values of this table line (`measuring_machines`)."""
    miss: str
    """Text of the first tested value that misses the published one: value, accepted range and cause; or empty."""


def headline_lines(ledger: Ledger, results: Sequence[ClaimResult]) -> list[HeadlineLine]:
    """Return a table line per headline (best-known) claim, in the order of `ledger`, from the results of all claims."""
    by_claim = {result.claim.id: {row.row.label: row for row in result.rows} for result in results}
    return [
        _line(number, headline, by_claim[headline.claim])
        for number, headline in enumerate(ledger.headlines, start=1)
    ]


def _line(number: int, headline: Headline, by_label: Mapping[str, RowResult]) -> HeadlineLine:
    rows, others = ([by_label[label] for label in some] for some in (headline.rows, headline.otherwise))
    values = {}
    for kind in SHOWN_KINDS:
        values[kind] = value_text(rows, kind)
        other = value_text(others, kind)
        if values[kind] == NOT_RUN and other != units.NO_VALUE:
            values[kind] = other
    printed = " / ".join(dict.fromkeys(row.row.published for row in rows))
    published = headline.published or BOUND_SIGNS.get(rows[0].row.bound, "") + append_unit(
        printed, rows[0].row.unit
    )
    miss = next((describe_miss(row) for row in rows if row.verdict in BAD), "")
    verdict, machines = weakest_verdict(rows), measuring_machines(rows)
    return HeadlineLine(number, headline.name, headline.claim, published, values, verdict, machines, miss)


def describe_miss(row: RowResult) -> str:
    """Return a text about a tested value that misses the published one: tested value, accepted values, and cause."""
    missed = next(finding for finding in row.findings if finding.verdict in BAD)
    accepted, _, rule = missed.tolerance.partition(": ")
    if rule:
        accepted += f" ({rule.partition(' (')[0]})"
    else:
        accepted = OUTCOMES.get(row.row.published, row.row.published)
    cause = row.row.note.partition(". ")[0].rstrip(".")
    return f"{missed.kind} {_text(row, missed.value)}, accepted {accepted}.{f' {cause}.' * bool(cause)}"


def describe_accepted(row: RowResult) -> str:
    """Return the text of the values that agree with the published one under the strongest evidence, without unit."""
    accepted = row.findings[0].tolerance if row.findings else units.NO_VALUE
    accepted, rule, _ = accepted.partition(": ")
    accepted = accepted.removesuffix(row.row.unit or " ").rstrip()
    return accepted if rule else OUTCOMES.get(row.row.published, row.row.published)


def describe_margin(row: RowResult) -> str:
    """Return the percentages, such as `-8 +22`, by which a value may decrease or increase and still agree."""
    if row.margin == (0, 0):
        return "0"
    ends = zip("-+", row.margin or (), strict=False)
    shown = (f"{sign}{100 * end:.3g}" for sign, end in ends if end < float("inf"))
    return " ".join(shown) or units.NO_VALUE


def describe_strength(row: RowResult) -> str:
    """Return a text on a reproduced value: margin, weakness of the test, a simulator fault that the test detects."""
    parts = (
        f"Margin {describe_margin(row)} %." if row.margin else "",
        f"Weak: {row.weakness}." if row.weakness else "",
        f"Injected simulator fault that changes the verdict: {row.mutations[0]}." if row.mutations else "",
    )
    return " ".join(filter(None, parts))


def measuring_machines(rows: Sequence[RowResult]) -> tuple[str, ...]:
    """Return each device that measured a tested value, with the scale of its run, such as `one rank of 64`."""
    measured = [one for row in rows for one in row.findings if one.decided and one.measured_on]
    return tuple(
        dict.fromkeys(
            f"{one.measured_on if one.kind == EMULATED else f'{one.scale}, {one.measured_on}'}"
            f"{REFERENCE_SUFFIX * one.is_reference}"
            for one in measured
        )
    )


def value_text(rows: Sequence[RowResult], kind: str) -> str:
    """Return as text the values of `kind` (such as simulated) for published values; a single value has its interval."""
    found = [row.under(kind) for row in rows]
    if not any(found):
        return units.NO_VALUE
    decided = [[finding for finding in findings if finding.decided] for findings in found]
    if not all(decided):
        return NOT_RUN
    first = decided[0][0]
    if first.scale != PUBLISHED_SCALE and not isinstance(first.expected, (str, type(None))):
        return _agreement([finding for findings in decided for finding in findings])
    digits = 3 if len(rows) > 1 or first.low != first.high else 4
    texts = [
        " or ".join(
            dict.fromkeys(_text(row, f.value, digits) for f in findings if f.reading or f is findings[0])
        )
        for row, findings in zip(rows, decided, strict=True)
    ]
    if len(rows) > MAX_LISTED_VALUES:
        return f"{min(texts, key=float)} to {max(texts, key=float)}"
    if len(rows) > 1 or kind != SIMULATED or first.low == first.high:
        return " / ".join(texts)
    return f"{texts[0]} ({_text(rows[0], first.low)} to {_text(rows[0], first.high)})"


def _agreement(findings: Sequence[Finding]) -> str:
    """Return as text the ratio farthest from 1 of a scaled-down run's value to the formula's; `exact` if all are 1."""
    ratios = [float(finding.value or 0.0) / float(finding.expected or 1.0) for finding in findings]
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    return "exact" if abs(farthest - 1) < 1e-9 else f"{units.number(farthest)} of formula"


def _text(row: RowResult, value: Value | None, digits: int = 3) -> str:
    if value is None or isinstance(value, str):
        return OUTCOMES.get(value or "", value or units.NO_VALUE)
    return format_value(float(f"{value:.{digits}g}"), row.row.printed)
