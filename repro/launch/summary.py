"""The end of a run as data: how every selected experiment stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from repro.config import suites
from repro.results.schema import CONCLUSIVE, MEASURED
from repro.results.select import by_key, by_keys
from repro.results.store import Store


def summarise(
    suite: suites.Suite,
    entries: list[suites.Entry],
    store: Store,
    ran: set[str],
    needs: dict[str, str],
    evidence: str = MEASURED,
) -> dict[str, Any]:
    """Plain JSON data on every selected experiment; `ran` names those that this run had to do.

    `needs` says of each by name what it needs and this machine has not.  Where that is something and the
    store has no record from elsewhere, `expected` is null: there is nothing to expect here.
    """
    records = store.records()
    latest = by_key(records, evidence)
    rows = []
    for entry in entries:
        record = latest.get(entry.experiment.key)
        outcome = record.outcome if record else "not run"
        lacking = "" if record else needs[entry.experiment.name]
        logs = store.root / "logs" / entry.experiment.key
        rows.append(
            {
                "name": entry.experiment.name,
                "key": entry.experiment.key,
                "outcome": outcome,
                "expected": None if lacking or not entry.expect else outcome == entry.expect,
                "reason": record.reason if record else lacking and f"needs {lacking}",
                "already_known": entry.experiment.name not in ran,
                "logs": str(logs) if outcome not in CONCLUSIVE and logs.exists() else "",
            }
        )
    keys = {row["key"] for row in rows}
    ratios = [
        {
            "subject": record.subject.name,
            "baseline": record.baseline.name,
            **{name: getattr(record, name) for name in ("metric", "ratio", "low", "high", "rounds")},
        }
        for pair, record in by_keys(records).items()
        if set(pair) <= keys and evidence == MEASURED
    ]
    return {
        "suite": suite.name,
        "evidence": evidence,
        "results": str(store.root),
        "counts": dict(Counter(row["outcome"] for row in rows)),
        "experiments": rows,
        "comparisons": ratios,
        "skipped_lines": store.skipped,
    }


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    summary: dict[str, Any]
    """What `summarise` found, and under `stopped` what stopped it."""
    code: int
    """The command's exit code: 128 plus a signal's number; 1 if a result is not as expected; else 0."""


def run_end(summary: dict[str, Any], *, failure: str, signal: int) -> RunEnd:
    """The end of a run that `failure` stopped, or `signal`; empty and 0 for none."""
    summary["stopped"] = failure or (f"by signal {signal}" if signal else "")
    wrong = failure or any(row["expected"] is False for row in summary["experiments"])
    return RunEnd(summary, 128 + signal if signal else int(bool(wrong)))
