"""`repro run --dry-run`: what would run, where, and how long it took last time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from repro.launch.preview import ELSEWHERE, KNOWN, TO_RUN, ExperimentPreview, preview_run
from repro.util import units
from repro.util.console import WIDE, print_json, stdout
from repro.util.table import table


def command(
    suites: list[Path], only: list[str], results: Path, rerun: bool, json: bool, evidence: str, system: str
) -> int:
    """Print every selected experiment and what would become of it; always 0.  Raises `ConfigError`."""
    found = preview_run(suites, only, results, rerun, evidence, system)
    if json:
        print_json([asdict(each) for each in found])
        return 0
    memory = ("memory of a device",) if any(each.memory for each in found) else ()
    headings = ("experiment", "", "where", *memory, "steps", "took last time", "stopped after")
    rows = table(*headings, left={"experiment", "", "where", *memory}, wrap=("where", *memory))
    for each in found:
        held = (each.memory,) if memory else ()
        rows.add_row(f"{each.suite}/{each.name}", each.state, each.where, *held, *_how_long(each))
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


def _how_long(each: ExperimentPreview) -> tuple[str, str, str]:
    if each.state == ELSEWHERE:
        return "", "", ""
    took = "no estimate" if each.last_s is None else units.seconds(each.last_s)
    return str(each.steps), took, units.seconds(each.limit_s) if each.limit_s else "never"
