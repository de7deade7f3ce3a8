"""`repro export`: claims, values, experiments or records as a table for programs, papers and pull requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.claims.ledger import KINDS
from repro.config import ConfigError
from repro.config.words import count_noun
from repro.results.reference_records import write_reference
from repro.results.store import print_remarks, read_records
from repro.util import files
from repro.util.extras import missing_package_hint

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet", "markdown", "latex")
TABLES = ("headlines", "summary", "claims", "values", "experiments", "comparisons", "records", "unknowns")
REFERENCE = "reference"
"""Name of the table whose file is JSON lines: the measurements on GPUs, as reference records of the package."""


def write_table(results: Path, table: str, form: str, output: Path | None, own: Sequence[Path] = ()) -> int:
    """Write one table to `output`, or to standard output; parquet and `reference` need `output`.

    `own`: additional ledger files. Raises `ConfigError` for an unknown table or format, or a missing `output`.
    """
    if table not in (*TABLES, REFERENCE):
        raise ConfigError("--table", table, f"one of {', '.join((*TABLES, REFERENCE))}")
    if table == REFERENCE:
        if output is None:
            raise ConfigError("--output", "", "a file: reference records are JSON lines")
        count = write_reference(read_records(results), output)
        print(f"{count_noun(count, 'record')} in {output}.")
        return 0
    if form not in FORMATS:
        raise ConfigError("--format", form, f"one of {', '.join(FORMATS)}")
    if form == "parquet" and output is None:
        raise ConfigError("--output", "", "a file: parquet is no text")
    frame = build_table(results, table, own)
    if frame.empty:
        print(f"note: no {table} in {results}: the table is empty", file=sys.stderr)
    if form == "parquet":
        assert output is not None
        _parquet(frame, output)
        return 0
    text = _WRITERS[form](frame)
    if output is None:
        sys.stdout.write(text)
    else:
        files.write_file(output, text)
    return 0


def build_table(results: Path, table: str, own: Sequence[Path] = ()) -> pd.DataFrame:
    """Return one of `TABLES` from the store at `results`; an empty store has claims with analytic evidence only."""
    from repro.report import evidence

    found = evidence.read_store(results, own)
    print_remarks(found.torn)
    frames: dict[str, Callable[[], pd.DataFrame]] = {
        "headlines": found.headlines,
        "summary": found.summary,
        "claims": found.claims,
        "values": found.values,
        "experiments": found.experiments,
        "comparisons": found.comparisons,
        "records": found.provenance,
        "unknowns": found.unknowns,
    }
    return frames[table]()


LONG_COLUMNS = (
    *("source", "how", "title", "reason", "why", "given", "key", "written"),
    *(f"{kind}_{part}" for kind in KINDS for part in ("tolerance", "origin")),
)
"""Columns that Markdown tables leave out."""


def _markdown(frame: pd.DataFrame) -> str:
    """Return the frame as a Markdown table without long and empty columns."""
    shown = _filled(frame.drop(columns=[name for name in LONG_COLUMNS if name in frame]))
    cells = shown.map(lambda value: str(value).replace("|", "\\|") if isinstance(value, str) else value)
    return str(cells.to_markdown(index=False)) + "\n"


def _latex(frame: pd.DataFrame) -> str:
    shown = _filled(frame).style.hide(axis="index").format(escape="latex")
    return str(shown.format_index(escape="latex", axis=1).to_latex(hrules=True))


def _filled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame without empty columns, and with an empty cell for each missing value."""
    filled = frame.dropna(axis="columns", how="all").astype(object)
    return filled.where(filled.notna(), "")


def _parquet(frame: pd.DataFrame, output: Path) -> None:
    # A column of numbers and words ("inf", an outcome) has no parquet type.
    mixed = [name for name in frame if frame[name].map(type).nunique() > 1 and frame[name].dtype == object]
    typed = frame.assign(**{str(name): frame[name].map(_text) for name in mixed})
    try:
        typed.to_parquet(output, index=False)
    except ImportError:
        raise ConfigError("--format", "parquet", says=missing_package_hint("pyarrow")) from None


def _text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)


_WRITERS: dict[str, Callable[[pd.DataFrame], str]] = {
    "csv": lambda frame: str(frame.to_csv(index=False)),
    "markdown": _markdown,
    "latex": _latex,
}
