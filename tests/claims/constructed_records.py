"""Constructed ledgers and records of experiments that did not run, for the tests of the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.claims.judge import judge
from repro.claims.ledger import Ledger
from repro.claims.reader import load_ledger
from repro.claims.verdicts import ClaimResult
from repro.config import Experiment, Layout, Model
from repro.results.reference_records import ReferenceFile
from repro.results.schema import ComparisonRecord, ExperimentRecord, Record, Side
from tests.records import made_up

SOURCE = """
title = "Test"
[[source]]
key = "PAPER"
title = "A paper"
where = "a shelf"
"""
"""Start of a ledger with one source."""
HEAD = f"""{SOURCE}[[claim]]
id = "a-claim"
title = "Twice as fast"
family = "throughput"
published = "2x"
source = ["PAPER p.1"]
certainty = "confirmed"
unit = "x"
metric = "ratio"
needs = "two GPUs"
rows = [
"""
"""Ledger with one claim, up to the rows of the claim."""
SMALL, ONE_RANK = Model(name="m", layers=2, hidden=16, heads=4, vocab=64, seq=16), Layout()
RATIO = 'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")'
"""Expression of the ratio of the rates of two experiments."""


def record(
    name: str, *, written: str = "2026-01-01T00:00:00Z", outcome: str = "ok", **metrics: float
) -> ExperimentRecord:
    """Return a record of an experiment with `metrics`; a name without a suite belongs to suite s."""
    suite, _, name = name.rpartition("/")
    reason = "" if outcome == "ok" else "rank 1 ran out of memory"
    return made_up(name, suite=suite or "s", written=written, outcome=outcome, reason=reason, metrics=metrics)


def conditions(layout: Layout = ONE_RANK, model: Model = SMALL, **keys: Any) -> dict[str, Any]:
    """Return the conditions of an experiment of a small model; `keys` are fields of `Experiment`."""
    return Experiment(**{"name": "a", "model": model, "layout": layout, **keys}).as_dict()


def comparison(
    subject: str,
    baseline: str,
    ratio: float = 2.0,
    low: float | None = None,
    high: float | None = None,
    **keys: str,
) -> ComparisonRecord:
    """Return the comparison of two experiments of suite s that one launch interleaved."""
    sides = {"subject": Side(name=subject, key=subject), "baseline": Side(name=baseline, key=baseline)}
    numbers = {"ratio": ratio, "low": low, "high": high, "rounds": 5}
    return ComparisonRecord(
        **{"suite": "s", "name": "x", "metric": "samples_per_s", **sides, **numbers, **keys}
    )


def value(expression: str, keys: str = "") -> str:
    """Return the TOML table of one evidence; `keys` are its other keys."""
    return f"{{ value = '{expression}', {keys} }}" if keys else f"{{ value = '{expression}' }}"


def row(published: str = "2.0", label: str = "x", **keys: str) -> str:
    """Return the line of a row in a ledger; `keys` are TOML texts."""
    words = "".join(f", {key} = {text}" for key, text in keys.items())
    return f'{{ label = "{label}", published = "{published}"{words} }},\n'


def write_ledger(folder: Path, rows: str, head: str = HEAD) -> Ledger:
    """Return the ledger of a file in `folder` with one claim that has `rows`."""
    (folder / "test.toml").write_text(f"{head}{rows}]\n")
    return load_ledger(folder)


def judged(
    folder: Path, rows: str, *records: Record, references: Sequence[ReferenceFile] = ()
) -> ClaimResult:
    (result,) = judge(write_ledger(folder, rows), records, references)
    return result
