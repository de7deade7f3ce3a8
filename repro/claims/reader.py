"""Reader of ledger files: builds `repro.claims.ledger.Ledger` from TOML and checks every key and expression."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from repro.claims import ledger
from repro.claims.expression import (
    Expression,
    ExpressionError,
    Uncertain,
    Value,
    check_expression,
    parse,
    texts,
)
from repro.claims.formulas import CONSTANTS, FORMULAS, SCRIPT_COUNTS
from repro.claims.independence import analytic_origin, is_constant, shared_input
from repro.claims.one_device import device_functions
from repro.claims.published import UNITS, PrintedNumber, digitised, parse_printed_number, printed
from repro.claims.records import Records
from repro.claims.tolerance import BOUNDS, RELATIVE_TOLERANCE, TOLERANCE_POINTS, statement_of
from repro.config.errors import ConfigError, require
from repro.results.schema import EMULATED, SIMULATED
from repro.results.select import select

LEDGER_DIRECTORY = Path(__file__).parent
_CLOSED = {**FORMULAS, **SCRIPT_COUNTS, "printed": printed, "digitised": digitised}
_WITH_RECORDS = {**_CLOSED, **Records([]).functions("measured"), **device_functions(select([]), [])}
SYSTEMS = LEDGER_DIRECTORY.parent / "config" / "systems"
_DOCUMENT = re.compile(r"[\w.-]+\.(?:png|jpg)\b|[\w.-]+/[\w.-]+#\d+")
"""Pattern of documents that a citation can name: a picture file, or an issue `OWNER/REPOSITORY#NUMBER`."""
BEYOND_REPORTS = "9999"
"""Sort key of ledger files without a date, which come after all dated files."""
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2} at [0-9a-f]{7,}$")


def load_ledger(directory: Path = LEDGER_DIRECTORY, own: tuple[Path, ...] = ()) -> ledger.Ledger:
    """Read and check every ledger file `*.toml` in `directory`, then the user's files `own`.

    Raises:
        ConfigError: A file is invalid; the message names file, claim, row and key.
    """
    files = {path: ledger.read_ledger_file(path) for path in sorted(directory.glob("*.toml"))}
    for path in own:
        if any(path.name == other.name for other in files):
            raise ConfigError("--ledger", str(path), "a file name that no other file of claims has")
        files[path] = ledger.read_ledger_file(path)
    sources: dict[str, ledger.Source] = {}
    for path, content in files.items():
        for source in content.source:
            require(source.key not in sources, "key", source.key, "used once", file=str(path), where="source")
            sources[source.key] = source
    files = dict(sorted(files.items(), key=lambda item: item[1].date or BEYOND_REPORTS))
    claims: dict[str, ledger.Claim] = {}
    for path, content in files.items():
        for entry in content.claim:
            try:
                if entry.id in claims:
                    right = f"an id used once; {claims[entry.id].file} has another claim with this id"
                    raise ConfigError("id", entry.id, right)
                claims[entry.id] = _claim(entry, sources, path.name)
            except ConfigError as error:
                raise error.within(file=str(path), where=entry.id) from None
    require(claims, "claims", str(directory), "a folder with files of published claims (*.toml)")
    _check_sentences(claims.values())
    check_shared_documents(
        claims.values(), (path.read_text(encoding="utf-8") for path in SYSTEMS.glob("*.toml"))
    )
    for path, content in files.items():
        for headline in content.headline:
            _check_headline(headline, claims, str(path))
    return ledger.Ledger(
        claims=tuple(claims.values()),
        headlines=tuple(headline for content in files.values() for headline in content.headline),
        sources=sources,
        titles={path.name: content.title for path, content in files.items()},
        about={path.name: content.about or content.title for path, content in files.items()},
        dates={path.name: content.date for path, content in files.items()},
    )


def check_shared_documents(claims: Iterable[ledger.Claim], system_texts: Iterable[str]) -> None:
    """Raise `ConfigError` if a hardware system's file takes a number from the document that states a tested value."""
    documents = set(_DOCUMENT.findall(" ".join(system_texts)))
    for claim in claims:
        for row in claim.rows:
            cited = set(_DOCUMENT.findall(row.source or " ".join(claim.source)))
            tests = any(one.origin in (ledger.TRACE, ledger.RUN) for one in row.evidence)
            if tests and not row.calibrates and cited & documents:
                shared = ", ".join(sorted(cited & documents))
                says = f"the simulated system takes a number from {shared}; name it in the key `given`"
                raise ConfigError(
                    "source", row.source, says=says, file=claim.file, where=f"{claim.id}.{row.label}"
                )


def _check_sentences(claims: Iterable[ledger.Claim]) -> None:
    """Raise `ConfigError` if values that quote the same published sentence are tested with different simulations."""
    read: dict[str, tuple[str, set[str]]] = {}
    for claim in claims:
        for row in (row for row in claim.rows if row.sentence):
            experiments = {
                text
                for one in row.evidence
                if one.kind == SIMULATED
                for text in texts(one.value, row.variables)
            }
            first, others = read.setdefault(row.sentence, (claim.id, experiments))
            if experiments != others:
                differing = ", ".join(sorted(experiments ^ others))
                contrast = f"those of {first} differ in: {differing}"
                right = f"a key that only rows with the same simulated experiments share; {contrast}"
                raise ConfigError("sentence", row.sentence, right, where=f"{claim.id}.{row.label}")


def _check_headline(headline: ledger.Headline, claims: Mapping[str, ledger.Claim], file: str) -> None:
    """Raise `ConfigError` if a headline names a claim or a published value (by its label) that the ledger lacks."""
    try:
        _one_of("claim", headline.claim, claims)
        labels = [row.label for row in claims[headline.claim].rows]
        for label in (*headline.rows, *headline.otherwise):
            _one_of("rows", label, labels)
        require(headline.rows, "rows", headline.rows, f"labels of rows of {headline.claim}")
    except ConfigError as error:
        raise error.within(file=file, where=f"headline[{headline.name}]") from None


def _claim(entry: ledger.ClaimEntry, sources: Mapping[str, ledger.Source], file: str) -> ledger.Claim:
    require(bool(_ID.fullmatch(entry.id)), "id", entry.id, "lower-case words joined by hyphens")
    _one_of("family", entry.family, ledger.FAMILIES)
    require(bool(entry.source), "source", entry.source, "at least one source key with section or page")
    for source in entry.source:
        _one_of("source", source.partition(" ")[0], sources)
    steps = tuple(_number("steps", step).value for step in entry.steps)
    rows = [_row(entry, row, row.published, {}, f"rows[{row.label}]") for row in entry.rows]
    for table in entry.table:
        rows += _table_rows(entry, table)
    require(rows, "rows", expected="at least one row, in rows or in [[claim.table]]")
    labels = [row.label for row in rows]
    for label in labels:
        require(labels.count(label) == 1, "label", label, "a different label for every row of the claim")
    for row in rows:
        if row.metric == "limit" and not steps:
            raise ConfigError(
                "steps", says="is missing: metric = limit needs the model sizes that the source tried"
            )
    if not any(row.main for row in rows):
        rows = [dataclasses.replace(row, main=True) for row in rows]
    parts = entry.published.count(";") + 1
    if sum(row.main for row in rows) < parts:
        right = f"true in {parts} or more rows, since the claim's `published` names {parts} values"
        raise ConfigError("main", expected=right)
    predicted = any(row.blind for row in rows)
    right = "day and commit of the rows' predictions `blind`, such as 2026-11-22 at 1c75963; empty without `blind`"
    is_dated = bool(_DAY.match(entry.predicted_blind)) if predicted else not entry.predicted_blind
    require(is_dated, "predicted_blind", entry.predicted_blind, right)
    _one_of("certainty", entry.certainty, ledger.CERTAINTIES)
    lists = {"source": tuple(entry.source), "contradictions": tuple(entry.contradictions)}
    return ledger.Claim(**_common(entry, ledger.Claim) | lists, steps=steps, rows=tuple(rows), file=file)


def _common(entry: object, of: type[Any]) -> dict[str, Any]:
    """Return the values of a ledger table that are also fields of the dataclass `of`, except `steps` and `rows`."""
    names = {field.name for field in dataclasses.fields(of)} - {"steps", "rows"}
    return {name: value for name, value in vars(entry).items() if name in names}


def _table_rows(entry: ledger.ClaimEntry, table: ledger.TableEntry) -> list[ledger.Row]:
    for key in [*table.keys, *(cell.column for cell in table.cells)]:
        _one_of("table.columns", key, table.columns)
    errors = {cell.column: cell.error for cell in table.cells}
    rows = []
    for line in table.body:
        right = f"{len(table.columns)} values, one for each column of {table.columns}"
        require(len(line) == len(table.columns), "table.body", line, right)
        at = dict(zip(table.columns, line, strict=True))
        variables = {
            key: _variable(value, errors.get(key, 0.0)) for key, value in at.items() if key.isidentifier()
        }
        name = " ".join(str(at[key]) for key in table.keys)
        for cell in table.cells:
            published = at[cell.column]
            if published == "":
                continue
            if not isinstance(published, str):
                raise ConfigError(
                    f"table.body[{name}].{cell.column}", published, "a published value in quotes"
                )
            label = f"{name}: {cell.label or cell.column}"
            calibrates = cell.calibrates or (str(at.get("calibrates", "")) if cell.simulated else "")
            notes = (cell.note, str(at.get("note", "")), str(at.get(f"{cell.column} note", "")))
            note = " ".join(part for part in notes if part)
            blind, erratum = at.get(f"{cell.column} blind", ""), cell.erratum or at.get("erratum", "")
            keys: dict[str, Any] = {"calibrates": calibrates, "blind": str(blind), "erratum": str(erratum)}
            filled = dataclasses.replace(cell, label=label, note=note, **keys)
            rows.append(_row(entry, filled, published, variables, label))
    return rows


def _variable(value: int | float | str, error: float) -> Value | Uncertain:
    """Return a ledger table's cell as an input of expressions, uncertain by `error` or the last digit's rounding."""
    if not isinstance(value, str):
        return value
    try:
        number = parse_printed_number(value)
    except ValueError:
        return value
    return digitised(number.value, error) if error else printed(value)


def _row(
    claim: ledger.ClaimEntry,
    entry: ledger.TestableEntry,
    published: str,
    variables: Mapping[str, Value | Uncertain],
    where: str,
) -> ledger.Row:
    try:
        metric = _one_of("metric", entry.metric or claim.metric, RELATIVE_TOLERANCE)
        certainty = _one_of("certainty", entry.certainty or claim.certainty, ledger.CERTAINTIES)
        require(entry.error >= 0, "error", entry.error, "0 or more")
        unit = _one_of("unit", claim.unit if entry.unit is None else entry.unit, UNITS)
        says = "needs a key `simulated` in the same row, whose expression computes the predicted value"
        require(bool(entry.simulated) or not entry.blind, "blind", entry.blind, says=says)
        number: PrintedNumber | None
        try:
            number = parse_printed_number(published)
        except ValueError:
            number = None
        evidence = []
        if entry.analytic:
            value = parse_checked("analytic", entry.analytic, _CLOSED, variables)
            says = "has the same value for all numbers of the row, so the test can never fail"
            require(not is_constant(value, variables), "analytic", entry.analytic, says=says)
            origin = ledger.ITSELF if entry.given else analytic_origin(value, variables)
            evidence.append(
                ledger.Evidence(
                    kind="analytic", scale=origin, origin=origin, value=value, expect=None, metric=metric
                )
            )
        for kind in ledger.KINDS[1:]:
            for item in getattr(entry, kind):
                found = _evidence(kind, item, metric, variables)
                evidence.append(dataclasses.replace(found, origin=ledger.ITSELF) if entry.given else found)
        says = "needs a key `simulated` in the same row: the simulated value that is fitted to `published`"
        require(bool(entry.simulated) or not entry.calibrates, "calibrates", entry.calibrates, says=says)
        right = "a number such as 1.88, 14.4B or 3-5, since each test without `expect` is compared with it"
        is_compared = any(item.expect is None for item in evidence)
        require(number is not None or not is_compared, "published", published, right)
        for points in sorted({metric, *(item.metric for item in evidence)} & TOLERANCE_POINTS.keys()):
            says = f"must be % with metric {points}, whose tolerance is in percentage points"
            require(unit == "%", "unit", unit, says=says)
        if len({bool(item.reading) for item in evidence if item.kind != "analytic"}) > 1:
            raise ConfigError("reading", says="must be given for all tests of the row, or for none")
        calls = frozenset(name for item in evidence for name in item.value.calls)
        statement = statement_of(number, published, entry.bound, metric, calls)
        right = f"{statement}, since the keys published, bound and metric and the functions called imply it"
        require(entry.statement in ("", statement), "statement", entry.statement, right)
        _one_of("bound", entry.bound, BOUNDS)
        derived = {
            "published": published,
            "unit": unit,
            "metric": metric,
            "statement": statement,
            "certainty": certainty,
            "blind": _number("blind", entry.blind) if entry.blind else None,
            "needs": entry.needs or claim.needs,
            "not_comparable": entry.not_comparable or claim.not_comparable,
        }
        row = ledger.Row(
            **_common(entry, ledger.Row) | derived,
            printed=number,
            evidence=tuple(evidence),
            variables=variables,
        )
        shared = shared_input(row)
        right = f"a text that names the published number that the test uses as an input, because {shared}"
        require(not shared, "given", "", right)
        return row
    except ConfigError as error:
        raise error.within(where=where) from None


def _evidence(
    kind: str, item: ledger.EvidenceEntry, metric: str, variables: Mapping[str, Value | Uncertain]
) -> ledger.Evidence:
    if item.scale not in (ledger.PUBLISHED_SCALE, ledger.SCALED_TWIN) and not item.scale.startswith(
        ledger.ONE_RANK
    ):
        raise ConfigError("scale", item.scale, "'published scale', 'one rank of N' or 'scaled twin'")
    if item.scale == ledger.SCALED_TWIN and metric not in ("exact", "ratio") and not item.expect:
        says = "is missing: must be the formula of the value at the scale of the scaled-down twin"
        raise ConfigError("expect", says=says)
    right = "needs metric = ratio and no key expect: small emulated networks reproduce only ratios"
    is_ratio = metric == "ratio" and not item.expect
    require(kind != EMULATED or is_ratio, EMULATED, item.value, says=right)
    is_word = item.expect.lstrip()[:1] in ("'", '"', "")
    if not (is_word or item.metric or metric == "exact" or item.scale == ledger.SCALED_TWIN):
        says = f"is missing, but expect is given: must be {metric}, the row's tolerance class, or exact for equality"
        raise ConfigError("metric", says=says)
    fallback = "exact" if item.expect else metric
    return ledger.Evidence(
        kind=kind,
        scale=ledger.EMULATED_NETWORK if kind == EMULATED else item.scale,
        origin=ledger.TRACE if kind == "simulated" else ledger.RUN,
        value=parse_checked(kind, item.value, _WITH_RECORDS, variables),
        expect=parse_checked("expect", item.expect, _WITH_RECORDS, variables) if item.expect else None,
        metric=_one_of("metric", item.metric or fallback, RELATIVE_TOLERANCE),
        reading=item.reading,
    )


def parse_checked(
    key: str, text: str, functions: Mapping[str, Any], variables: Collection[str]
) -> Expression:
    """Parse `text`, the expression of a ledger key `key`. Raises `ConfigError` for unknown functions and variables."""
    try:
        expression = parse(text)
        check_expression(expression, functions, frozenset(variables) | frozenset(CONSTANTS))
    except ExpressionError as error:
        raise ConfigError(key, text, says=str(error)) from None
    return expression


def _one_of(key: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        import difflib

        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(k for k in known if k)}"
        raise ConfigError(key, value, says=hint)
    return value


def _number(key: str, text: str) -> PrintedNumber:
    try:
        return parse_printed_number(text)
    except ValueError as error:
        raise ConfigError(key, text, says=str(error)) from None
