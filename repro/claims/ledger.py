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
"""Kinds of evidence for a published value, weakest first.

`emulated`: local processes train a scaled-down model over links whose bandwidth is reduced in proportion to their
compute rate. Only ratios of two such runs compare with published ratios.
"""
CERTAINTIES = {
    "confirmed": "the published value was read in the primary source",
    "second-hand": "the published value was read in a source that quotes the primary one",
    "press only": "the published value was found only in a press article",
    "digitised": "the value was measured in pixels of a published figure, and its error is stated",
    "derived": "the value was calculated from confirmed numbers and is not printed itself",
    "unconfirmed": "the value was quoted from memory, and no source was found",
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
CLOSED_FORM, COUNT = "closed form", "count of script lines"
ITSELF, TRACE, RUN = "the source against itself", "trace", "run"
"""Origins of a value that is compared with a published value.

`CLOSED_FORM`: a formula of a paper. `COUNT`: counted lines of scripts in this repository. `ITSELF`: other numbers of
the claim's source, or an answer that is an input of the test. `TRACE`: a simulated training step. `RUN`: a run of
processes.
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Publication that claims cite; one `[[source]]` table of sources.toml."""

    key: str
    """Short name by which claims cite the publication, for example `ZERO3`."""
    title: str
    """Title of the publication."""
    where: str
    """Location of the publication: arXiv number, repository and commit, or publisher."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test of a published value: an expression that computes a value, and the value that it must agree with."""

    kind: str
    """One of `KINDS`."""
    scale: str
    """Scale of the tested run: `published scale`, `one rank of N` (memory of one rank), `scaled twin` (scaled-down
    model) or `scaled twin, emulated network`; for analytic evidence, the `origin`."""
    origin: str
    """Origin of the value, such as `CLOSED_FORM` (formula), `TRACE` (simulated step) or `RUN` (run of processes)."""
    value: Expression
    """Expression that computes the tested value, in bytes, seconds, FLOP or, for counts and ratios, without a unit."""
    expect: Expression | None
    """Expression of the value that a scaled-down run must have, mostly a formula; None: the published value."""
    metric: str
    """Class of the compared metric, which sets the tolerance; a key of `tolerance.RELATIVE_TOLERANCE`."""
    reading: str = ""
    """Assumption of a test about a condition that the source does not state; empty: no assumption."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published value of a claim, and the evidence that tests it."""

    label: str
    published: str
    """Published value as printed, without the unit."""
    printed: PrintedNumber | None
    """Published value as a number; None if the source prints a formula or words."""
    unit: str
    """Unit of the published value, a key of `published.UNITS`."""
    metric: str
    """Class of the published metric, which sets the tolerance; a key of `tolerance.RELATIVE_TOLERANCE`."""
    statement: str
    """Kind of the published statement, one of `tolerance.STATEMENTS`, for example `value` or `bound`."""
    bound: str
    """Bound in the source: `over`, `at least`, `under`, `at most` or `up to`; empty: the value is no bound."""
    error: float
    """Error of a published value that was measured in a figure, in the unit of the value; 0 for a printed value."""
    certainty: str
    evidence: tuple[Evidence, ...]
    calibrates: str
    """Parameter of the time model that is calibrated on this published value, a `name` of
    simulate/time/calibration_points.toml; empty: none. Simulations of such a value get no verdict."""
    blind: PrintedNumber | None
    """Prediction by this suite, in the published unit, committed before the published value was read; None: none."""
    needs: str
    """Hardware and training run that a measurement of the published value needs."""
    not_comparable: str
    """Reason why no simulation or measurement can be compared with the published value; empty if one can."""
    note: str
    source: str = ""
    """Document that prints the value, if the claim cites several documents; empty: all sources of the claim."""
    erratum: str = ""
    """Arithmetic on the source's own numbers that contradicts the printed number; empty: none."""
    sentence: str = ""
    """Key of a published sentence that several claims quote. The same simulations must test all values of this key."""
    main: bool = True
    """Whether the verdict of this published value counts in the verdict of its claim."""
    given: str = ""
    """Part of the published result that the test uses as an input, which limits the verdict to `follows`; or empty."""
    variables: Mapping[str, Value | Uncertain] = field(default_factory=dict, compare=False)
    """Variables of the expressions, by column name: cells of the ledger table's line that has the published value."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published claim: its statement, conditions, sources and values."""

    id: str
    title: str
    """Statement of the claim in one sentence."""
    family: str
    """Topic by which suites and the report group claims, one of `FAMILIES`, for example `memory`."""
    published: str
    """Published values of the claim as one line of text."""
    conditions: str
    source: tuple[str, ...]
    """Citations; each is a source key with section or page, such as `ZERO3 sec. 3.1 p.8`."""
    certainty: str
    """Certainty of the published values, a key of `CERTAINTIES`, for example `confirmed`."""
    contradictions: tuple[str, ...]
    """Contradictions about the claim between its sources, or within one source."""
    note: str
    needs: str
    steps: tuple[float, ...]
    """Model sizes that the source tried; the next larger size ends the tolerance of a largest model (`limit`)."""
    rows: tuple[Row, ...]
    file: str
    """Name of the ledger file."""
    predicted_blind: str = ""
    """Day and commit of predictions that were made before the published values were read; empty: no predictions."""
    repeat: str = ""
    """Command that finds the published number directly, such as `repro fit ...`; empty: none."""

    @property
    def prediction(self) -> str:
        """Return the date and the median error of predictions made before reading the published value, or ""."""
        errors = [
            abs(row.blind.value / row.printed.value - 1) for row in self.rows if row.blind and row.printed
        ]
        if not errors:
            return ""
        count = f"{len(errors)} predictions made before their published values were read"
        return f"{count} ({self.predicted_blind}), median error {median(errors):.1%}"


@dataclass(kw_only=True)
class Headline:
    """One line of the table of best-known statements of the reproduced reports; `[[headline]]` in headlines.toml."""

    name: str
    """Short name, of at most 30 characters, of the best-known statement that a line of the headline table shows."""
    claim: str
    rows: list[str]
    """Labels of the claim's published values that test this headline statement."""
    otherwise: list[str] = field(default_factory=list)
    """Labels of substitute values, which a table shows if `rows` have no result. They do not affect the verdict."""
    published: str = ""
    """Text that the table displays as published value; empty: the published values of `rows`."""


@dataclass(frozen=True)
class Ledger:
    """All published claims in the order of their publication, and the cited sources by key."""

    claims: tuple[Claim, ...]
    headlines: tuple[Headline, ...]
    sources: Mapping[str, Source]
    titles: Mapping[str, str]
    """Title of each file of published claims, by file name."""
    about: Mapping[str, str]
    """Author of the claims in each ledger file, by file name: `ZeRO`, `Megatron`."""
    dates: Mapping[str, str]
    """Publication month of the claims in each ledger file, such as `2019-09`, by file name; may be empty."""

    def claim(self, claim_id: str) -> Claim:
        """Return the claim with the given id or number in the headline table; `ConfigError` proposes similar ids."""
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
        """Return the published values of a headline's claim that the headline lists, in `rows` or in `otherwise`."""
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
    """Keys of a published value in a ledger file, in `rows` or as a column. Some empty keys take the claim's value."""

    label: str = ""
    unit: str | None = None
    """Unit of the published value; empty: no unit; None: the unit of the claim."""
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
    """Published value with its tests, as an entry of the list `rows` in a ledger file."""

    published: str


@dataclass(kw_only=True)
class CellEntry(TestableEntry):
    """Column of published values in a ledger table; each of its cells is a separately tested value."""

    column: str


@dataclass(kw_only=True)
class TableEntry:
    """Table of published values, `[[claim.table]]`. In `body`, strings are printed values, and numbers are exact."""

    columns: list[str]
    keys: list[str]
    """Columns that identify a table line; their joined cells begin the label of each published value of the line."""
    cells: list[CellEntry]
    body: list[list[int | float | str]]


@dataclass(kw_only=True)
class ClaimEntry:
    """Table `[[claim]]` of a ledger file, from which a `Claim` is built; `Claim` explains the keys of the table."""

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
    """Title of the ledger file."""
    about: str = ""
    """Author of the claims, in one or two words; if empty, the title is shown. Several files may name one author."""
    date: str = ""
    """Month of the publication, such as `2019-09`, by which ledger files are ordered; empty: the file comes last."""
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
    """Return an instance of the dataclass `cls` from a table of a ledger file; inner tables become instances, too.

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
    """Return the name of an inner table for error messages: a claim's id, or a path such as `rows[label]`."""
    names = [item.get(k) for k in ("id", "key", "label", "column", "name")] if isinstance(item, dict) else []
    name = next((name for name in names if name), number)
    return (
        str(name)
        if key == "claim" and name != number
        else ".".join(p for p in (where, f"{key}[{name}]") if p)
    )
