"""`repro status`: cases x jobs in one table."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from repro.config import ConfigError
from repro.launch.slurm.monitoring.case_states import (
    CANCELLED,
    DONE,
    FAILED,
    LOST,
    PENDING,
    REQUEUED,
    RUNNING,
    STATES,
    CaseState,
    read_case_states,
    status_exit_code,
)
from repro.launch.slurm.monitoring.registry import Registry
from repro.launch.slurm.scheduler import SchedulerError
from repro.results.store import Store
from repro.util.console import stdout
from repro.util.table import table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFRESH_S = 5.0
_COLOURS = {
    RUNNING: "green",
    FAILED: "red",
    LOST: "red",
    CANCELLED: "yellow",
    REQUEUED: "yellow",
    PENDING: "dim",
}


def print_status(results: Path, watch: bool, every: bool, json: bool) -> int:
    """Print where every case of the newest submission of each suite stands; `every`: of all submissions.

    Returns 0 when nothing is open and nothing failed, 3 while cases wait or run, 1 if some failed.
    """
    registry, store = Registry(results), Store(results)
    if not registry.all():
        raise ConfigError("--results", str(results), "a folder that `repro submit` has used")
    try:
        if watch and not json:
            return _watch(registry, store, every)
        cases, warnings = read_case_states(registry, store, every)
    except SchedulerError as error:
        raise ConfigError("SLURM", says=f"does not answer: {error}") from None
    if json:
        print(jsonlib.dumps({"cases": [case.as_dict() for case in cases], "warnings": warnings}))
    else:
        _show(cases, warnings, stdout())
    return status_exit_code(cases)


def _show(cases: list[CaseState], warnings: list[str], console: Console) -> None:
    """Print a table of what is not done, and the totals."""
    has_room = console.is_terminal or len(cases) <= 60
    console.print(_table([case for case in cases if has_room or case.state != DONE]))
    console.print(_totals(cases), markup=False)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if any(case.state in (LOST, CANCELLED) and not case.recorded for case in cases):
        console.print("`repro collect` records what was lost or cancelled; `repro submit` runs it again")


def _table(cases: list[CaseState]) -> Table:
    from rich.text import Text

    made = table("case", "job", "state", "nodes", "", left=5, wrap=("",))
    for case in cases:
        state = (
            f"{case.state} ({case.outcome})" if case.state == DONE and case.outcome != "ok" else case.state
        )
        if case.state in (FAILED, LOST):
            state = f"{case.state}: {case.failure}"
        again = f"started {case.restarts + 1} times" if case.restarts else ""
        detail = "; ".join(part for part in (case.detail, again) if part)
        colour = _COLOURS.get(case.state, "")
        made.add_row(case.name, case.job, Text(state, style=colour), case.nodes, detail)
    return made


def _totals(cases: list[CaseState]) -> str:
    counts = Counter(case.state for case in cases)
    text = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    suites = ", ".join(dict.fromkeys(case.suite for case in cases))
    return f"{suites}: {len(cases)} cases: {text}"


def _watch(registry: Registry, store: Store, every: bool) -> int:
    """Show the table again every few seconds, until nothing waits or runs.  Raises `SchedulerError`.

    A cluster that does not answer for a while, after it has answered once, is no reason to stop.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    console = stdout()
    cases, warnings = read_case_states(registry, store, every)
    note = ""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown = _table([case for case in cases if case.state != DONE] or cases)
            live.update(Group(shown, Text(f"{_totals(cases)}{note}", style="dim italic")), refresh=True)
            if not note and status_exit_code(cases) != 3:
                break
            time.sleep(REFRESH_S)
            try:
                cases, warnings = read_case_states(registry, store, every)
                note = ""
            except SchedulerError as error:
                note = (
                    note or f"; as of {time.strftime('%H:%M:%S')}, since when SLURM does not answer: {error}"
                )
    _show(cases, warnings, console)
    return status_exit_code(cases)
