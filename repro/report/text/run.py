"""`repro run`: bring the store to where it lacks nothing of a suite, and say how every experiment stands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from repro.report.text import results
from repro.results.schema import MEASURED
from repro.results.select import select
from repro.results.side_by_side import of_run
from repro.results.store import Store
from repro.util.console import print_json


def command(
    suites: list[Path], only: list[str], results: Path, rerun: bool, json: bool, evidence: str, system: str
) -> int:
    """Run what the store lacks of `suites`, one after the other, and print a summary of each (`json`: a list).

    Returns 0 if every experiment that can be had here has the outcome that its suite expects, 1 if not, and 128
    plus the signal's number if it was interrupted.  Raises `ConfigError` before anything is started.
    """
    from repro.launch.run import run

    found = []
    for ended in run(suites, only, results, rerun, evidence, system):
        found.append(ended)
        if not json:
            show(ended.summary)
    if json:
        summaries = [ended.summary for ended in found]
        print_json(summaries if len(suites) > 1 else summaries[0])
    return max(ended.code for ended in found)


def show(summary: dict[str, Any]) -> None:
    """Print results first, then surprises, the totals last."""
    rows = summary["experiments"]
    names = [row["name"] for row in rows]
    records, _ = Store(Path(summary["results"])).readable()  # the summary says what is not
    results.show(of_run(select(records), summary["suite"], names, summary["evidence"]))
    for remark in summary["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
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
