"""Output of `repro run`: results and totals, and with `--dry-run` the experiments that would run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.report.text import results
from repro.results.schema import MEASURED
from repro.results.select import select
from repro.results.store import Store
from repro.results.tables import results_of_run
from repro.util import units
from repro.util.console import WIDE, print_json, stdout
from repro.util.table import table

if TYPE_CHECKING:
    from repro.launch.preview import ExperimentPreview


def print_run(
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
            print_run_summary(ended.summary)
    if json:
        summaries = [ended.summary for ended in found]
        print_json(summaries if len(suites) > 1 else summaries[0])
    return max(ended.code for ended in found)


def print_run_summary(summary: dict[str, Any]) -> None:
    """Print results first, then surprises, the totals last."""
    rows = summary["experiments"]
    names = [row["name"] for row in rows]
    records, _ = Store(Path(summary["results"])).readable()  # the summary says what is not
    results.print_result_tables(results_of_run(select(records), summary["suite"], names, summary["evidence"]))
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


def print_dry_run(
    suites: list[Path], only: list[str], results: Path, rerun: bool, json: bool, evidence: str, system: str
) -> int:
    """Print every selected experiment and what would become of it; always 0.  Raises `ConfigError`."""
    from repro.launch.preview import ELSEWHERE, KNOWN, TO_RUN, preview_run

    found = preview_run(suites, only, results, rerun, evidence, system)
    if json:
        print_json([asdict(each) for each in found])
        return 0
    memory = ("memory of a device",) if any(each.memory for each in found) else ()
    headings = ("experiment", "", "where", *memory, "steps", "took last time", "stopped after")
    rows = table(*headings, left={"experiment", "", "where", *memory}, wrap=("where", *memory))
    for each in found:
        held = (each.memory,) if memory else ()
        rows.add_row(f"{each.suite}/{each.name}", each.state, each.where, *held, *_duration_cells(each))
    console = stdout(WIDE)
    console.print(rows)
    todo = [each for each in found if each.state == TO_RUN]
    known = sum(each.last_s for each in todo if each.last_s is not None)
    counts = (f"{sum(each.state == state for each in found)} {state}" for state in (TO_RUN, KNOWN, ELSEWHERE))
    last = f"; those that ran before took {units.seconds(known)}" if known else ""
    new = sum(each.last_s is None for each in todo)
    no_estimate = f"; no estimate for {new} of them, which never ran here" if new else ""
    console.print(f"{', '.join(counts)}{last}{no_estimate}", markup=False)
    return 0


def _duration_cells(each: ExperimentPreview) -> tuple[str, str, str]:
    from repro.launch.preview import ELSEWHERE

    if each.state == ELSEWHERE:
        return "", "", ""
    took = "no estimate" if each.last_s is None else units.seconds(each.last_s)
    return str(each.steps), took, units.seconds(each.limit_s) if each.limit_s else "never"
