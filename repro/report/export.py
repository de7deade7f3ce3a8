"""``repro export``: the claims, their values, experiments or comparisons as a table for other programs and papers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.config import ConfigError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet", "markdown", "latex")
TABLES = ("claims", "values", "experiments", "comparisons")
KINDS = ("analytic", "simulated", "measured")


def command(results: Path, table: str, form: str, output: Path | None) -> int:
    """Write one table; to standard output without ``output``, but for parquet.  Raises ``ConfigError``."""
    if table not in TABLES:
        raise ConfigError("--table", table, f"one of {', '.join(TABLES)}")
    if form not in FORMATS:
        raise ConfigError("--format", form, f"one of {', '.join(FORMATS)}")
    if form == "parquet" and output is None:
        raise ConfigError("--output", "", "a file: parquet is no text")
    if output is not None and not output.parent.is_dir():
        raise ConfigError("--output", str(output), "a file in a folder that exists")
    frame = read(results, table)
    if form == "parquet":
        assert output is not None
        _parquet(frame, output)
        return 0
    text = _WRITERS[form](frame)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
    return 0


def read(results: Path, table: str) -> pd.DataFrame:
    """One of ``TABLES`` from the store at ``results``; an empty store has claims with analytic evidence only."""
    import pandas as pd

    from repro.results import frame
    from repro.results.store import Store

    records = Store(results).records()
    if table == "experiments":
        return frame.experiments(records)
    if table == "comparisons":
        return frame.comparisons(records)
    return pd.DataFrame(claims(records) if table == "claims" else values(records))


def claims(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per claim: what was published, how many of its values each evidence reproduced, the verdict."""
    from repro.claims.judge import judge
    from repro.claims.ledger import load
    from repro.claims.table import table

    return [
        {
            "claim": line.id,
            "published": line.published,
            "analytic": line.analytic,
            "simulated": line.simulated,
            "measured": line.measured,
            "verdict": line.verdict,
            "basis": line.basis,
            "reason": line.reason,
        }
        for line in table(judge(load(), records))
    ]


def values(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per published value, with the value of each kind of evidence and its interval beside it."""
    from repro.claims.judge import judge
    from repro.claims.ledger import load
    from repro.claims.table import as_dict

    ledger = load()
    rows = []
    for result in judge(ledger, records):
        document = as_dict(result, ledger)
        for row in document["rows"]:
            found: dict[str, Any] = {}
            for finding in row["evidence"]:  # strongest first
                found.setdefault(finding["kind"], finding)
            evidence = {
                f"{kind}{suffix}": found.get(kind, {}).get(key)
                for kind in KINDS
                for suffix, key in (
                    ("", "value"),
                    ("_low", "low"),
                    ("_high", "high"),
                    ("_verdict", "verdict"),
                )
            }
            rows.append(
                {
                    "claim": document["id"],
                    "family": document["family"],
                    "value": row["label"],
                    "published": row["value"],
                    "printed": row["published"],
                    "unit": row["unit"],
                    "certainty": row["certainty"],
                    **evidence,
                    "verdict": row["verdict"],
                    "basis": row["basis"],
                    "reason": row["reason"],
                }
            )
    return rows


def _markdown(frame: pd.DataFrame) -> str:
    """For people and pull requests: what is long or empty is left out."""
    shown = frame.drop(columns=[name for name in ("reason", "key", "written") if name in frame])
    shown = _filled(shown)
    cells = shown.map(lambda value: str(value).replace("|", "\\|") if isinstance(value, str) else value)
    return str(cells.to_markdown(index=False)) + "\n"


def _latex(frame: pd.DataFrame) -> str:
    shown = _filled(frame)
    return str(
        shown.style.hide(axis="index")
        .format(escape="latex")
        .format_index(escape="latex", axis=1)
        .to_latex(hrules=True)
    )


def _filled(frame: pd.DataFrame) -> pd.DataFrame:
    """Without empty columns, and with empty cells for what is missing."""
    kept = frame.dropna(axis="columns", how="all").astype(object)
    return kept.where(kept.notna(), "")


def _parquet(frame: pd.DataFrame, output: Path) -> None:
    # A column of numbers and words ("inf", an outcome) has no type there.
    mixed = [name for name in frame if frame[name].map(type).nunique() > 1 and frame[name].dtype == object]
    typed = frame.assign(**{str(name): frame[name].map(_text) for name in mixed})
    try:
        typed.to_parquet(output, index=False)
    except ImportError:
        raise ConfigError("--format", "parquet", "pyarrow to be installed: pip install pyarrow") from None


def _text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)


_WRITERS: dict[str, Callable[[pd.DataFrame], str]] = {
    "csv": lambda frame: str(frame.to_csv(index=False)),
    "markdown": _markdown,
    "latex": _latex,
}
