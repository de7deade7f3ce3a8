"""Dataclasses of the published claims, and the schema of the ledger's TOML files, which define the claims.

A claim has rows; a row is one published value with the expressions that test it. `docs/ledger.md` shows how to add
a claim.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from repro.claims.expression import Expression, Uncertain, Value
from repro.claims.published import PrintedNumber
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.results.schema import EMULATED

T = TypeVar("T")
KINDS = ("analytic", "simulated", EMULATED, "measured")
"""Kinds of evidence, weakest first.

`emulated`: local processes train a scaled-down model over links whose bandwidth is reduced in proportion to their
compute rate. Only ratios of two such runs compare with published ratios.
"""
CERTAINTIES = {
    "confirmed": "read in the primary text",
    "second-hand": "read in a source that quotes the primary one",
    "press only": "only in a press article",
    "digitised": "measured by pixel from a published figure; the error is stated",
    "derived": "arithmetic on confirmed numbers, not published as such",
    "unconfirmed": "remembered; no text found",
}
FAMILIES = (
    "memory",
    "limit",
    "communication",
    "throughput",
    "scaling",
    "time",
    "configuration",
    "quality",
    "harness",
)
PUBLISHED_SCALE, SCALED_TWIN, ONE_RANK = "published scale", "scaled twin", "one rank of "
EMULATED_NETWORK = "scaled twin, emulated network"
CLOSED_FORM, COUNT = "closed form", "count of what is committed"
ITSELF, TRACE, RUN = "the source against itself", "trace", "run"
"""Origins of evidence, in order: a formula of a paper; counted lines of scripts in this repository; other numbers of
the claim's source, or an answer that the suite sets; a simulated training step; a run of processes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Publication that claims cite; one `[[source]]` table of sources.toml."""

    key: str
    """Citation key in claims, for example `ZERO3`."""
    title: str
    """Title of the publication."""
    where: str
    """arXiv number, repository and commit, or publisher."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test of a published value: the expression of a value, and the expected value."""

    kind: str
    """One of `KINDS`."""
    scale: str
    """Scale of the tested run: `published scale`, `one rank of N`, `scaled twin` or `scaled twin, emulated network`.
    Analytic evidence repeats `origin`."""
    origin: str
    """Origin of the value: `CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    value: Expression
    """Expression of the value, in bytes, seconds, FLOP or without a unit."""
    expect: Expression | None
    """Expression of the expected value, a formula at the scale of a scaled-down twin; None: the published value."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE_TOLERANCE`."""
    reading: str = ""
    """Condition that the source does not state and that this evidence assumes; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published value of a claim, and the evidence that tests it."""

    label: str
    published: str
    """Published value as printed, without the unit."""
    printed: PrintedNumber | None
    """`published` as a number; None for a formula or words."""
    unit: str
    """Unit of the published value, a key of `published.UNITS`."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE_TOLERANCE`."""
    statement: str
    """Kind of the statement, one of `tolerance.STATEMENTS`."""
    bound: str
    """Bound in the source: empty (equal), `over`, `at least`, `under`, `at most`, `up to`."""
    error: float
    """Error of a published value that was measured from a figure, in `unit`; 0 for a printed value."""
    certainty: str
    evidence: tuple[Evidence, ...]
    calibrates: str
    """Parameter of the time model that is calibrated on this published value, a `name` of
    simulate/time/calibration_points.toml; empty: none. Simulations of such a value get no verdict."""
    blind: PrintedNumber | None
    """Prediction of the suite, in `unit`, made by people who did not know `published`."""
    needs: str
    """Hardware and run that would measure the published value."""
    not_comparable: str
    """Reason why no value can be compared with the published one; empty if values can."""
    note: str
    source: str = ""
    """Document that prints the value, if the claim cites several documents; empty: all sources of the claim."""
    erratum: str = ""
    """Arithmetic on the source's own numbers that contradicts the printed number; empty: none."""
    sentence: str = ""
    """Key of a published sentence that rows of several claims quote; all these rows must read the same simulations."""
    main: bool = True
    """Whether the row's verdict counts for the claim's verdict."""
    given: str = ""
    """Part of the published answer that is an input of the test. The best verdict of such a row is `follows`."""
    variables: Mapping[str, Value | Uncertain] = field(default_factory=dict, compare=False)
    """Cells of the row's line in a ledger table, by column; expressions read them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published claim: its statement, conditions, sources and values."""

    id: str
    title: str
    """The claim in one sentence."""
    family: str
    """One of `FAMILIES`; suites and the report group by it."""
    published: str
    """Published values in one line of text."""
    conditions: str
    source: tuple[str, ...]
    """Citations; each is a source key with section or page, such as `ZERO3 sec. 3.1 p.8`."""
    certainty: str
    """A key of `CERTAINTIES`."""
    contradictions: tuple[str, ...]
    """Contradictions between sources or inside one source."""
    note: str
    needs: str
    steps: tuple[float, ...]
    """Sizes that the source tried; rows with the metric `limit` need them."""
    rows: tuple[Row, ...]
    file: str
    """Name of the ledger file."""
    predicted_blind: str = ""
    """Day and commit of the blind predictions of this claim's rows; empty without predictions."""
    repeat: str = ""
    """Command that searches the claim's number directly, such as `repro fit ...`; empty: none."""

    @property
    def prediction(self) -> str:
        """Return the date and the median |predicted / published - 1| of blind predictions; empty without them."""
        errors = [
            abs(row.blind.value / row.printed.value - 1) for row in self.rows if row.blind and row.printed
        ]
        if not errors:
            return ""
        return f"blind on {self.predicted_blind}: {len(errors)} values, median error {median(errors):.1%}"


@dataclass(kw_only=True)
class Headline:
    """One of the best-known statements of the reports, in one line; `[[headline]]` in headlines.toml."""

    name: str
    """The statement in at most 30 characters."""
    claim: str
    rows: list[str]
    """Labels of the claim's rows that test the statement."""
    otherwise: list[str] = field(default_factory=list)
    """Labels of rows whose values a table shows if `rows` have no value. These rows do not affect the verdict."""
    published: str = ""
    """Text of the published value; empty: the published values of `rows`."""


@dataclass(frozen=True)
class Ledger:
    """Claims in the order of their publication, and their sources by key."""

    claims: tuple[Claim, ...]
    headlines: tuple[Headline, ...]
    sources: Mapping[str, Source]
    titles: Mapping[str, str]
    """Title of each ledger file, by file name."""
    about: Mapping[str, str]
    """Author of the claims in each ledger file, by file name: `ZeRO`, `Megatron`."""
    dates: Mapping[str, str]
    """Publication month of the claims in each ledger file, such as `2019-09`, by file name; may be empty."""

    def claim(self, claim_id: str) -> Claim:
        """Return the claim with this id, or the claim of the headline with this number (`1` is the first).

        Raises:
            ConfigError: No claim has this id; the message lists similar ids.
        """
        if claim_id.isdigit() and 0 < int(claim_id) <= len(self.headlines):
            claim_id = self.headlines[int(claim_id) - 1].claim
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        known = [claim.id for claim in self.claims]
        near = difflib.get_close_matches(claim_id, known, n=3, cutoff=0.4)
        near += [k for k in known if claim_id and claim_id in k and k not in near][: 3 - len(near)]
        hint = (
            f"no such claim; did you mean {' or '.join(near)}?"
            if near
            else "must be the id of a claim; `repro claims` lists all ids"
        )
        raise ConfigError("claim", claim_id, says=hint)

    def rows_of(self, headline: Headline) -> list[Row]:
        """Return the claim's rows that the headline names in `rows` and in `otherwise`."""
        labels = (*headline.rows, *headline.otherwise)
        return [row for row in self.claim(headline.claim).rows if row.label in labels]


@dataclass(kw_only=True)
class EvidenceEntry:
    """Test of a published value in a ledger file: `measured = { value = "...", expect = "...", metric = "exact" }`."""

    value: str
    expect: str = ""
    scale: str = PUBLISHED_SCALE
    metric: str = ""
    reading: str = ""


@dataclass(kw_only=True)
class TestableEntry:
    """Keys of a ledger file that a row and a table column have in common; an empty key takes the claim's value."""

    label: str = ""
    unit: str | None = None
    """Unit of the published value. An empty text is no unit, and None is the unit of the claim."""
    metric: str = ""
    bound: str = ""
    statement: str = ""
    error: float = 0.0
    certainty: str = ""
    analytic: str = ""
    simulated: list[EvidenceEntry] = field(default_factory=list)
    emulated: list[EvidenceEntry] = field(default_factory=list)
    measured: list[EvidenceEntry] = field(default_factory=list)
    calibrates: str = ""
    blind: str = ""
    needs: str = ""
    not_comparable: str = ""
    note: str = ""
    source: str = ""
    erratum: str = ""
    sentence: str = ""
    main: bool = False
    given: str = ""


@dataclass(kw_only=True)
class RowEntry(TestableEntry):
    """Published value that a ledger file lists in `rows`."""

    published: str


@dataclass(kw_only=True)
class CellEntry(TestableEntry):
    """Column of a ledger table that contains published values; each of its cells becomes a row."""

    column: str


@dataclass(kw_only=True)
class TableEntry:
    """`[[claim.table]]` of a ledger file. Strings in `body` are printed values, numbers are exact, "" is no value."""

    columns: list[str]
    keys: list[str]
    """Columns whose cells name a line of the table."""
    cells: list[CellEntry]
    body: list[list[int | float | str]]


@dataclass(kw_only=True)
class ClaimEntry:
    """Claim in a ledger file, `[[claim]]`; `Claim` explains its keys."""

    id: str
    title: str
    family: str
    published: str
    source: list[str]
    certainty: str
    predicted_blind: str = ""
    conditions: str = ""
    metric: str = "exact"
    unit: str = ""
    contradictions: list[str] = field(default_factory=list)
    needs: str = ""
    not_comparable: str = ""
    note: str = ""
    repeat: str = ""
    steps: list[str] = field(default_factory=list)
    rows: list[RowEntry] = field(default_factory=list)
    table: list[TableEntry] = field(default_factory=list)


@dataclass(kw_only=True)
class FileEntry:
    """Content of one ledger file."""

    title: str
    """Title of the file."""
    about: str = ""
    """Author of the claims, in one or two words; empty for the title. Several files may name the same author."""
    date: str = ""
    """Month of the publication, `2019-09`. Ledger files are ordered by it; files without a date are last."""
    headline: list[Headline] = field(default_factory=list)
    claim: list[ClaimEntry] = field(default_factory=list)
    source: list[Source] = field(default_factory=list)


def read_ledger_file(path: Path) -> FileEntry:
    """Read one ledger file and check its keys and types.

    Raises:
        ConfigError: A key is invalid; the message names file, claim, row and key.
    """
    data = read_toml(path)
    if "title" not in data and data.keys() <= _ENTRY_FIELDS[FileEntry][0].keys():
        says = 'is missing: add title = "..." above the first table of the file'
        raise ConfigError("title", says=says, file=str(path))
    return _build_entry(FileEntry, data, str(path), "")


_INNER_ENTRIES: dict[tuple[type, str], type] = {
    (FileEntry, "claim"): ClaimEntry,
    (FileEntry, "source"): Source,
    (FileEntry, "headline"): Headline,
    (ClaimEntry, "rows"): RowEntry,
    (ClaimEntry, "table"): TableEntry,
    (TableEntry, "cells"): CellEntry,
    **{(cls, kind): EvidenceEntry for cls in (RowEntry, CellEntry) for kind in KINDS[1:]},
}


def _fields(cls: Any) -> tuple[dict[str, str], frozenset[str]]:
    """Return the type annotation of each field of a dataclass, and the names of the fields without a default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return {f.name: str(f.type) for f in fields}, frozenset(
        f.name for f in fields if f.default is missing and f.default_factory is missing
    )


_ENTRY_FIELDS = {cls: _fields(cls) for cls in (FileEntry, *_INNER_ENTRIES.values())}
_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda v: type(v) is str,
    "str | None": lambda v: type(v) is str,
    "bool": lambda v: type(v) is bool,
    "float": lambda v: type(v) in (int, float),
    "list[str]": lambda v: type(v) is list and all(type(i) is str for i in v),
    "list[list[int | float | str]]": lambda v: (
        type(v) is list
        and all(type(line) is list and all(type(i) in (int, float, str) for i in line) for line in v)
    ),
}


def _build_entry(cls: type[T], data: Any, file: str, where: str) -> T:
    """Return the dataclass `cls` for a table of a ledger file, with dataclasses for the inner tables.

    Only invalid tables are passed to pydantic, which writes the error message. Importing pydantic for valid claims
    would double the time of `repro claims`.
    """
    if not isinstance(data, dict):
        outer, _, key = where.rpartition(".")
        raise ConfigError(key, data, "a table", file=file, where=outer)
    known, required = _ENTRY_FIELDS[cls]
    values: dict[str, Any] = {}
    sound = required <= data.keys()
    for key, value in data.items():
        inner = _INNER_ENTRIES.get((cls, key))
        if inner is EvidenceEntry and isinstance(value, dict):
            value = [value]
        if inner is not None and isinstance(value, list):
            value = [
                _build_entry(inner, item, file, _place(where, key, n, item)) for n, item in enumerate(value)
            ]
        else:
            sound = sound and inner is None and key in known and _TYPE_CHECKS[known[key]](value)
        values[key] = value
    return cls(**values) if sound else build_dataclass(cls, values, file=file, where=where)


def _place(where: str, key: str, number: int, item: Any) -> str:
    """Return the name of an inner table for messages: the id of a claim, or `rows[label]` after the outer name."""
    names = [item.get(k) for k in ("id", "key", "label", "column", "name")] if isinstance(item, dict) else []
    name = next((name for name in names if name), number)
    return (
        str(name)
        if key == "claim" and name != number
        else ".".join(p for p in (where, f"{key}[{name}]") if p)
    )
