"""The end of a run in words and as data: how every selected experiment stands."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from typing import Any

from repro import suites
from repro.render import units
from repro.results.store import CONCLUSIVE, MEASURED, Store


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
    latest = store.latest(evidence)
    rows = []
    for entry in entries:
        record = latest.get(entry.experiment.key)
        outcome = record["outcome"] if record else "not run"
        lacking = "" if record else needs[entry.experiment.name]
        logs = store.root / "logs" / entry.experiment.key
        rows.append(
            {
                "name": entry.experiment.name,
                "key": entry.experiment.key,
                "outcome": outcome,
                "expected": None if lacking or not entry.expect else outcome == entry.expect,
                "reason": record["reason"] if record else lacking and f"needs {lacking}",
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
        if set(pair) <= keys and evidence == MEASURED
    ]
    return {
        "suite": suite.name,
        "evidence": evidence,
        "results": str(store.root),
        "counts": dict(Counter(row["outcome"] for row in rows)),
        "experiments": rows,
        "comparisons": ratios,
        "skipped_lines": store.torn,
    }


def conclude(summary: dict[str, Any], *, failure: str, signal: int, json: bool) -> int:
    """Print how a run ended and return its exit code; `signal` is the one that stopped it, 0 for none."""
    summary["stopped"] = failure or (f"by signal {signal}" if signal else "")
    if json:
        print(jsonlib.dumps(summary))
    else:
        show(summary)
    if signal:
        return 128 + signal
    return 0 if not failure and all(row["expected"] is not False for row in summary["experiments"]) else 1


def show(summary: dict[str, Any]) -> None:
    """Print what `summarise` found, ratios and surprises first, the totals last."""
    rows = summary["experiments"]
    for remark in summary["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
    for row in summary["comparisons"]:
        times = units.ratio(row["ratio"], row["low"], row["high"])
        times += f" the {row['metric']} of {row['baseline']}"
        print(f"{row['subject']}: {times}, {row['rounds']} rounds")
    for row in rows:
        if row["expected"] is None:
            print(": ".join(part for part in (row["name"], row["outcome"], row["reason"]) if part))
        elif not row["expected"]:
            logs = f"  logs: {row['logs']}" if row["logs"] else ""
            print(f"{row['name']}: {row['outcome']}  {row['reason']}{logs}")
    if summary["stopped"]:
        print(f"stopped: {summary['stopped']}; `repro run` goes on with what is missing")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary["counts"].items())
    wrong = sum(row["expected"] is False for row in rows)
    possible = " that can run here" if summary["evidence"] == MEASURED else " that can be simulated"
    elsewhere = possible if any(r["outcome"] == "not run" and r["expected"] is None for r in rows) else ""
    judged = f"all{elsewhere} as expected" if not wrong else f"{wrong} not as expected"
    what = "experiments" if summary["evidence"] == MEASURED else f"{summary['evidence']} experiments"
    print(f"{summary['suite']}: {len(rows)} {what}: {counts}; {judged}")
    print(f"records: {summary['results']}/records")
