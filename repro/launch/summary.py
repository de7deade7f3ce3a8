"""The end of a run in words and as data: how every selected experiment stands."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from repro import suites
from repro.results.store import CONCLUSIVE, Store


def summarise(
    suite: suites.Suite, entries: list[suites.Entry], store: Store, ran: set[str]
) -> dict[str, Any]:
    """Plain JSON data on every selected experiment; ``ran`` names those that this run had to do."""
    latest = store.latest()
    rows = []
    for entry in entries:
        record = latest.get(entry.experiment.key)
        outcome = record["outcome"] if record else "not run"
        logs = store.root / "logs" / entry.experiment.key
        rows.append(
            {
                "name": entry.experiment.name,
                "key": entry.experiment.key,
                "outcome": outcome,
                "expected": outcome == entry.expect,
                "reason": record["reason"] if record else "",
                "already_known": entry.experiment.name not in ran,
                "logs": str(logs) if outcome not in CONCLUSIVE and logs.exists() else "",
            }
        )
    keys = {row["key"] for row in rows}
    ratios = [
        {
            "subject": record["subject"]["name"],
            "baseline": record["baseline"]["name"],
            **{name: record[name] for name in ("metric", "ratio", "low", "high", "rounds")},
        }
        for pair, record in store.comparisons().items()
        if set(pair) <= keys
    ]
    return {
        "suite": suite.name,
        "results": str(store.root),
        "counts": dict(Counter(row["outcome"] for row in rows)),
        "experiments": rows,
        "comparisons": ratios,
        "skipped_lines": store.torn,
    }


def show(summary: dict[str, Any]) -> None:
    """Print what :func:`summarise` found, ratios and surprises first, the totals last."""
    rows = summary["experiments"]
    for remark in summary["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
    for row in summary["comparisons"]:
        span = f" ({row['low']:.3f} to {row['high']:.3f})" if row["low"] is not None else ""
        times = f"{row['ratio']:.3f} times{span} the {row['metric']} of {row['baseline']}"
        print(f"{row['subject']}: {times}, {row['rounds']} rounds")
    for row in rows:
        if not row["expected"]:
            logs = f"  logs: {row['logs']}" if row["logs"] else ""
            print(f"{row['name']}: {row['outcome']}  {row['reason']}{logs}")
    if summary["stopped"]:
        print(f"stopped: {summary['stopped']}; `repro run` goes on with what is missing")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary["counts"].items())
    wrong = sum(not row["expected"] for row in rows)
    judged = "all as expected" if not wrong else f"{wrong} not as expected"
    print(f"{summary['suite']}: {len(rows)} experiments: {counts}; {judged}")
    print(f"records: {summary['results']}/records")
