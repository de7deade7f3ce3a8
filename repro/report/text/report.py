"""`repro report` and `repro compare`: where the page is, and what changed between two sets of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from repro.config.errors import require
from repro.util import units
from repro.util.console import print_json

if TYPE_CHECKING:
    from repro.report.exports.compare import Change


def print_report(results: Path, out: Path, json: bool, notebooks: bool, own: Sequence[Path] = ()) -> int:
    """Write the report on the store `results` to `out` and print where; 0, or 1 if a notebook failed.

    `own`: ledger files whose claims are among the others.
    """
    from repro.report.page import build
    from repro.report.page.notebooks import CellFailed

    try:
        written = build.build(results, out, notebooks=notebooks, own=own)
    except CellFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if json:
        print_json(written.as_dict())
        return 0
    for remark in written.remarks:
        print(f"note: {remark}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in written.verdicts.items())
    seen = f"{written.experiments} experiments, {written.simulated} simulated"
    print(f"{written.claims} claims ({counts}); {seen}, {len(written.figures) // 2} figures")
    if written.notebooks:
        print(f"{len(written.notebooks)} notebooks: {written.notebooks[0].parent}")
    print(f"report: {written.page}")
    return 0


def print_comparison(
    first: str, second: str, results: Path, tolerance: float, json: bool, own: Sequence[Path] = ()
) -> int:
    """Print what differs; 1 if something is worse, else 0.  Raises `ConfigError`."""
    from repro.report.exports.compare import WORSE, changes_of

    require(0 <= tolerance < 1, "--tolerance", tolerance, "a part of 1, 0.05 for 5 %")
    changes = changes_of(first, second, results, tolerance, own)
    worse = sum(change.judged == WORSE for change in changes)
    if json:
        print_json({"changes": [asdict(change) for change in changes], "worse": worse})
    else:
        _show(changes)
    return 1 if worse else 0


def _show(changes: Sequence[Change]) -> None:
    """What got worse first."""
    from repro.report.exports.compare import BETTER, SAME, WORSE

    order = (WORSE, BETTER, SAME)
    for change in sorted(changes, key=lambda change: order.index(change.judged)):
        if change.judged != SAME or change.kind == "speed":
            times = f"{units.ratio(change.ratio, change.low, change.high)}  " if change.ratio else ""
            what = f"{change.judged:<6} {change.kind:<8} {change.name}"
            print(f"{what}: {times}{change.before} -> {change.after}")
    counts = {judged: sum(change.judged == judged for change in changes) for judged in (WORSE, SAME, BETTER)}
    print(", ".join(f"{count} {judged}" for judged, count in counts.items()))
