"""Schema of a ledger file: one dataclass per TOML table, and the conversion from TOML.

An invalid file raises one `ConfigError` line that names file, claim, row and key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from repro.claims.ledger import KINDS, PUBLISHED_SCALE, Source
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml

T = TypeVar("T")


@dataclass(kw_only=True)
class EvidenceEntry:
    """`measured = { value = "...", expect = "...", scale = "scaled twin", metric = "exact" }`."""

    value: str
    expect: str = ""
    scale: str = PUBLISHED_SCALE
    metric: str = ""


@dataclass(kw_only=True)
class Testable:
    """What a row and a column of a table have in common; empty: as the claim says."""

    label: str = ""
    unit: str | None = None
    """`""` is no unit, whatever the claim's is; left out: the claim's."""
    metric: str = ""
    bound: str = ""
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
    main: bool = False
    given: str = ""


@dataclass(kw_only=True)
class RowEntry(Testable):
    """One element of `rows`."""

    published: str


@dataclass(kw_only=True)
class CellEntry(Testable):
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
    """`[[claim]]`; the fields are explained at `ledger.Claim`."""

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
    steps: list[str] = field(default_factory=list)
    rows: list[RowEntry] = field(default_factory=list)
    table: list[TableEntry] = field(default_factory=list)


@dataclass(kw_only=True)
class FileEntry:
    """One ledger file."""

    title: str
    about: str = ""
    """Whose claims these are, in a word or two; several files may say the same.  Empty: the title."""
    claim: list[ClaimEntry] = field(default_factory=list)
    source: list[Source] = field(default_factory=list)


def read_file(path: Path) -> FileEntry:
    """The entries of one file, types and keys checked, contents not yet."""
    return _make(FileEntry, read_toml(path), str(path), "")


_INNER: dict[tuple[type, str], type] = {
    (FileEntry, "claim"): ClaimEntry,
    (FileEntry, "source"): Source,
    (ClaimEntry, "rows"): RowEntry,
    (ClaimEntry, "table"): TableEntry,
    (TableEntry, "cells"): CellEntry,
    **{(cls, kind): EvidenceEntry for cls in (RowEntry, CellEntry) for kind in KINDS[1:]},
}


def _fields(cls: Any) -> tuple[dict[str, str], frozenset[str]]:
    """Declared types by name, as written, and the names that have no default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return {f.name: str(f.type) for f in fields}, frozenset(
        f.name for f in fields if f.default is missing and f.default_factory is missing
    )


_FIELDS = {cls: _fields(cls) for cls in (FileEntry, *_INNER.values())}
_IS: dict[str, Callable[[Any], bool]] = {
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


def _make(cls: type[T], data: Any, file: str, where: str) -> T:
    """`cls(**data)`, inner tables first.

    A sound table is built at once; any other goes to `repro.config.files.build_dataclass`, whose pydantic words
    the complaint (importing pydantic for 80 sound claims would double the time that `repro claims` takes).
    """
    if not isinstance(data, dict):
        outer, _, key = where.rpartition(".")
        raise ConfigError(key, data, "a table", file=file, where=outer)
    known, required = _FIELDS[cls]
    values: dict[str, Any] = {}
    sound = required <= data.keys()
    for key, value in data.items():
        inner = _INNER.get((cls, key))
        if inner is EvidenceEntry and isinstance(value, dict):
            value = [value]
        if inner is not None and isinstance(value, list):
            value = [_make(inner, item, file, _place(where, key, n, item)) for n, item in enumerate(value)]
        else:
            sound = sound and inner is None and key in known and _IS[known[key]](value)
        values[key] = value
    return cls(**values) if sound else build_dataclass(cls, values, file=file, where=where)


def _place(where: str, key: str, number: int, item: Any) -> str:
    """How a person finds the inner table: a claim by its id, a row by its label, a cell by its column."""
    names = [item.get(k) for k in ("id", "key", "label", "column")] if isinstance(item, dict) else []
    name = next((name for name in names if name), number)
    return (
        str(name)
        if key == "claim" and name != number
        else ".".join(p for p in (where, f"{key}[{name}]") if p)
    )
