"""Output of `repro gpu-day` (all GPU measurements in one run): plan, progress, and changes of verdicts by an import."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.launch.gpu_day.result_files import FILES, StepOutcome, import_results
from repro.launch.gpu_day.runner import CLOSING_S, GpuDayRequest, planned_steps, run_gpu_day
from repro.launch.gpu_day.steps import GpuDayStep
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import ExperimentRecord, Record
from repro.results.store import read_records
from repro.util.console import PAGE_COLUMNS, new_table, print_json, print_page, stderr
from repro.util.units import NO_VALUE

MAX_ROWS, MAX_OTHERS = 12, 6
"""Maximum numbers without `--details`: rows of a printed table, and printed lines about failures and verdicts."""


def print_planned_steps(request: GpuDayRequest, json: bool, details: bool) -> int:
    """Print which measurements of `repro gpu-day` fit in its time limit, and with `details` all estimates; return 0."""
    request.check()
    with tempfile.TemporaryDirectory() as scratch:
        steps = planned_steps(request, Path(scratch))
    left_s = 60 * request.minutes - CLOSING_S
    rows = []
    for step in steps:
        starts = not step.missing and step.estimate_s <= left_s
        left_s -= step.estimate_s if starts else 0.0
        plan = f"needs {step.missing}" if step.missing else "starts" if starts else "no longer fits"
        rows.append((step, plan))
    if json:
        print_json([{**asdict(step), "in_checkout": step.in_checkout, "plan": plan} for step, plan in rows])
        return 0
    planned = [step for step, plan in rows if plan == "starts"]
    planned_s = sum(step.estimate_s for step in planned)
    needed_s = sum(step.estimate_s for step, _ in rows if not step.missing)
    answer = f"{len(planned)} of {len(rows)} steps fit the time: {planned_s:.0f} s of {60 * request.minutes:.0f} s."
    others = Counter(plan for _, plan in rows if plan != "starts").items()
    left_out = (
        f"Left out: {', '.join(f'{count} steps ({plan})' for plan, count in others)}." if others else ""
    )
    enough = f"All steps that can run on this machine take about {needed_s:.0f} s."
    wrap = ("plan", "question", "basis of the estimate")
    headings = ["step", "estimate (s)", "time limit (s)", *(wrap if details else ())]
    shown, most = new_table(*headings, left={"step", *wrap}, wrap=wrap), len(rows) if details else MAX_ROWS
    listed = [(step, plan) for step, plan in rows if details or plan == "starts"]
    for step, plan in listed[:most]:
        cells = step.name, f"{step.estimate_s:.0f}", f"{step.limit_s:.0f}", plan, step.question, step.basis
        shown.add_row(*cells[: len(headings)])
    more = f"--details lists {max(0, len(listed) - most)} more steps, and the purpose of each step."
    print_page(answer, left_out, enough, shown, "" if details else more)
    return 0


def print_gpu_day(request: GpuDayRequest, json: bool) -> int:
    """Run `repro gpu-day` with progress on standard error; return 1 if a measurement failed, 130 after an interrupt."""
    progress = stderr()

    def announce(step: GpuDayStep, outcome: StepOutcome | None) -> None:
        if json:
            return
        if outcome is None:
            progress.print(f"{step.name}: {step.question} (about {step.estimate_s:.0f} s)")
            return
        reason = f": {outcome.reason}" if outcome.reason else ""
        took = f" after {outcome.seconds:.0f} s with {outcome.records} new records" if outcome.seconds else ""
        progress.print(f"{step.name}: {outcome.outcome}{took}{reason}", markup=False)

    outcomes = run_gpu_day(request, announce)
    counts = Counter(outcome.outcome for outcome in outcomes)
    files = {name: (request.out / name).stat().st_size for name in FILES if (request.out / name).exists()}
    if json:
        print_json({"steps": [asdict(outcome) for outcome in outcomes], "files": files})
    else:
        wrong = [f"{o.name}: {o.outcome}: {o.reason}" for o in outcomes if o.outcome in FAILURES]
        print_page(
            f"{len(outcomes)} steps: {', '.join(f'{count} {kind}' for kind, count in counts.items())}.",
            f"Results: {request.out} ({len(files)} files, {sum(files.values()) / 1e6:.1f} MB).",
            *wrong[:MAX_OTHERS],
            command=f"repro gpu-day --import {request.out}",
        )
    if "interrupted" in counts or any("interrupted" in outcome.reason for outcome in outcomes):
        return 130
    return int(any(kind in counts for kind in FAILURES))


FAILURES = ("failed", "timeout", "interrupted")


def print_import(folder: Path, results: Path, json: bool, details: bool) -> int:
    """Import measurements that `repro gpu-day` wrote to `folder`, and print the changes of verdicts; return 0."""
    before = read_records(results)
    visit = import_results(folder, results)
    after = read_records(results)
    known = {record.id for record in before}
    added = [record for record in after if record.id not in known]
    verdicts = _changed_verdicts(before, after)
    if json:
        print_json(
            {
                "new_records": [_record_row(record, before) for record in added],
                "known_records": visit.known_records,
                "steps": visit.outcomes,
                "measurements": visit.measurements,
                "verdicts": verdicts,
            }
        )
        return 0
    gpus = visit.facts.get("provenance", {}).get("gpus") or []
    machine = str(gpus[0].get("name")) if gpus else "an unknown machine"
    lines = [f"claim {change['claim']}: {change['before']} -> {change['after']}" for change in verdicts]
    wrong = [outcome for outcome in visit.outcomes if outcome.get("outcome") != "ok"]
    lines += [
        f"{outcome.get('name')}: {outcome.get('outcome')}: {outcome.get('reason')}" for outcome in wrong
    ]
    for measurement in visit.measurements:
        values = {key: value for key, value in measurement.items() if isinstance(value, (int, float, str))}
        name = values.pop("name", "")
        numbers = (f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}" for key, v in values.items())
        lines.append(f"{name}: {', '.join(numbers)}")
    shown = new_table("new record", "outcome", "step time (s)", "earlier step time (s)", left=2)
    for record in added if details else added[:MAX_ROWS]:
        row = _record_row(record, before)
        times = (_seconds(row.get("step_s")), _seconds(row.get("earlier_step_s")))
        shown.add_row(row["name"], row["outcome"], *times)
    if not details:
        hidden = max(0, len(lines) - MAX_OTHERS) + len(added) - shown.row_count
        lines = [shorten(line, PAGE_COLUMNS, placeholder=" ...") for line in lines[:MAX_OTHERS]]
        lines += [f"--details lists {hidden} more records, failures and verdicts."] * bool(hidden)
    print_page(
        f"{results} has {visit.new_records} new records from {machine}; it already had {visit.known_records} others.",
        f"{len(verdicts) or 'No'} verdict{'s' * (len(verdicts) > 1)} changed.",
        *lines,
        shown,
    )
    return 0


def _changed_verdicts(before: Iterable[Record], after: Iterable[Record]) -> list[dict[str, str]]:
    """Return id, earlier and later verdict of every claim whose verdict or evidence changes with new records."""
    ledger = load_ledger()
    pairs = zip(judge(ledger, before), judge(ledger, after), strict=True)
    return [
        {"claim": new.claim.id, "before": _verdict(old), "after": _verdict(new)}
        for old, new in pairs
        if _verdict(old) != _verdict(new)
    ]


def _verdict(result: Any) -> str:
    return f"{result.verdict} ({result.basis})" if result.basis else str(result.verdict)


def _record_row(record: Record, before: Iterable[Record]) -> dict[str, Any]:
    """Return name, outcome and step time of a record, and its experiment's newest step time in records `before`."""
    row: dict[str, Any] = {"name": record.label, "kind": record.kind, "outcome": NO_VALUE}
    if isinstance(record, ExperimentRecord):
        earlier = [r for r in before if isinstance(r, ExperimentRecord) and r.label == record.label]
        same = [r for r in earlier if r.evidence == record.evidence]
        row |= {
            "outcome": record.outcome,
            "step_s": record.metrics.get(STEP_SECONDS),
            "reason": record.reason,
        }
        row["earlier_step_s"] = same[-1].metrics.get(STEP_SECONDS) if same else None
    return row


def _seconds(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.4g}"
