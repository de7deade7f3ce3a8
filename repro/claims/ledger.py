"""The ledger: every published claim, and the schema of the TOML files in this package that define the claims.

A claim has rows. A row is one published value with the expressions that test it. A file lists rows one by one
(`rows`) or as a table of the source (`[[claim.table]]`), whose `cells` name the columns with published values.
Expressions may use the other columns of a line by name. `docs/ledger.md` shows how to add a claim.
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

`emulated`: real processes train a small twin on this machine. Their emulated links are as slow as the compute, so
that the ratio of two runs compares with the published ratio.
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
"""Origins of evidence (`repro.claims.independence`): a formula of a paper and sizes; scripts of this repository; other
numbers of the same source, or a given answer; a simulated step; real processes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Publication of claims; `[[source]]` in sources.toml."""

    key: str
    """Citation key in claims, for example `ZERO3`."""
    title: str
    """Title of the publication."""
    where: str
    """arXiv number, repository and commit, or publisher."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test of a row."""

    kind: str
    """One of `KINDS`."""
    scale: str
    """`published scale`, `one rank of N`, `scaled twin`, `scaled twin, emulated network`; analytic:
    `origin`."""
    origin: str
    """`CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    value: Expression
    """Value in bytes, seconds, FLOP or plain numbers."""
    expect: Expression | None
    """Expected value: the formula at the twin's own scale; None: compare with the published value."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE`."""
    reading: str = ""
    """Condition that the source does not print and this evidence assumes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published value."""

    label: str
    published: str
    """Published value as printed, without the unit."""
    printed: PrintedNumber | None
    """`published` as a number; None for a formula or words."""
    unit: str
    """A key of `published.UNITS`."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE`."""
    statement: str
    """Kind of the statement, one of `tolerance.STATEMENTS`."""
    bound: str
    """Bound in the source: empty (equal), `over`, `at least`, `under`, `at most`, `up to`."""
    error: float
    """Error of digitisation, in `unit`; 0 without digitisation."""
    certainty: str
    evidence: tuple[Evidence, ...]
    calibrates: str
    """Number of the time model that is calibrated on this value, a `name` of simulate/time/calibration_points.toml;
    empty: none. A calibrated simulation is no evidence."""
    blind: PrintedNumber | None
    """Prediction of the suite, in `unit`, made by people who did not know `published`."""
    needs: str
    """Hardware and run that would measure it."""
    not_comparable: str
    """Reason why no value can be compared with the row; empty if values can."""
    note: str
    source: str = ""
    """Document of the row, where the claim cites several; empty: all sources of the claim."""
    erratum: str = ""
    """Arithmetic by which the source itself shows another number than the printed one."""
    sentence: str = ""
    """Name of the published sentence that rows of several claims quote; their simulations are the same."""
    main: bool = True
    """Whether the row decides the claim's verdict.  Other rows are shown and judged only."""
    given: str = ""
    """Part of the answer that is an input, of ours or of the suite; the best verdict of such a row is consistent."""
    variables: Mapping[str, Value | Uncertain] = field(default_factory=dict, compare=False)
    """Other columns of the row's line, for its expressions."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of one source."""

    id: str
    title: str
    """The claim in one sentence."""
    family: str
    """One of `FAMILIES`; suites and the report group by it."""
    published: str
    """One line with the published value for a person."""
    conditions: str
    source: tuple[str, ...]
    """Each is a source key and a place in it: `ZERO3 sec. 3.1 p.8`."""
    certainty: str
    """A key of `CERTAINTIES`."""
    contradictions: tuple[str, ...]
    """Contradictions between sources or inside one source."""
    note: str
    needs: str
    steps: tuple[float, ...]
    """Model sizes that the source tried, for class `limit`."""
    rows: tuple[Row, ...]
    file: str
    """Name of the ledger file."""
    predicted_blind: str = ""
    """Day and commit of the predictions in its rows' `blind`; empty without predictions."""
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
    """Labels of rows whose values are shown where `rows` have none; they have no part in the verdict."""
    published: str = ""
    """Published value in one text; empty: the published values of `rows`."""


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
    """Month of the publication of each ledger file, by file name; empty beyond the reports."""

    def claim(self, claim_id: str) -> Claim:
        """Return the claim with this id or number of a headline.  Raises `ConfigError` with near matches."""
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
            else "must be a claim's id; `repro claims` lists them"
        )
        raise ConfigError("claim", claim_id, says=hint)

    def rows_of(self, headline: Headline) -> list[Row]:
        """Return the rows of a headline, and those whose values are shown otherwise."""
        labels = (*headline.rows, *headline.otherwise)
        return [row for row in self.claim(headline.claim).rows if row.label in labels]


@dataclass(kw_only=True)
class EvidenceEntry:
    """`measured = { value = "...", expect = "...", scale = "scaled twin", metric = "exact" }`."""

    value: str
    expect: str = ""
    scale: str = PUBLISHED_SCALE
    metric: str = ""
    reading: str = ""


@dataclass(kw_only=True)
class TestableEntry:
    """Keys that a row and a column of a table have in common. An empty value takes the value of the claim."""

    label: str = ""
    unit: str | None = None
    """`""` is no unit; None is the unit of the claim."""
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
    """One element of `rows`."""

    published: str


@dataclass(kw_only=True)
class CellEntry(TestableEntry):
    """One element of a table's `cells`: the column of that name holds published values."""

    column: str


@dataclass(kw_only=True)
class TableEntry:
    """`[[claim.table]]`.  Strings in `body` are printed values, numbers are exact; "" is no value."""

    columns: list[str]
    keys: list[str]
    """Columns that name a line."""
    cells: list[CellEntry]
    body: list[list[int | float | str]]


@dataclass(kw_only=True)
class ClaimEntry:
    """`[[claim]]`; the fields are explained at `Claim`."""

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
    """One ledger file."""

    title: str
    """Title of the file."""
    about: str = ""
    """Author of the claims, in one or two words; empty for the title. Several files may name the same author."""
    date: str = ""
    """Month of the publication, `2019-09`, which orders the files. Files without a date follow."""
    headline: list[Headline] = field(default_factory=list)
    claim: list[ClaimEntry] = field(default_factory=list)
    source: list[Source] = field(default_factory=list)


def read_ledger_file(path: Path) -> FileEntry:
    """Read one file and check its keys and types.

    Raises:
        ConfigError: One line that names file, claim, row and key.
    """
    data = read_toml(path)
    if "title" not in data and data.keys() <= _ENTRY_FIELDS[FileEntry][0].keys():
        says = 'is missing: title = "..." of the file, above its first table'
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
    """Return the annotations by name, and the names without a default."""
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
    """Return `cls(**data)` with dataclasses for the inner tables.

    Only an invalid table goes to `build_dataclass`, whose pydantic words the error: importing pydantic for valid
    claims would double the time of `repro claims`.
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
    """Return the name of an inner table for a person: a claim's id, a row's label or a cell's column."""
    names = [item.get(k) for k in ("id", "key", "label", "column", "name")] if isinstance(item, dict) else []
    name = next((name for name in names if name), number)
    return (
        str(name)
        if key == "claim" and name != number
        else ".".join(p for p in (where, f"{key}[{name}]") if p)
    )
