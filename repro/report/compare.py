"""`repro compare A B`: changes between two stores or two commits, judged as better or worse.

The two sides are two sets of records of the same experiments. They did not run interleaved, so a disturbance of one
side also changes the ratio. The interval covers only the variation between the steps. `--tolerance` sets the relative
change that is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from repro.config.errors import ConfigError, require
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import by_key
from repro.results.store import read_records
from repro.util import units
from repro.util.console import PAGE_COLUMNS, new_table, print_json, print_page, stdout

WORSE, SAME, BETTER = "worse", "same", "better"
MAX_CHANGES = 16
"""Maximum number of printed changes without `--details`."""


@dataclass(frozen=True)
class Change:
    """Change of one experiment or claim between both sides."""

    kind: str
    """`speed` (samples/s, B over A), `memory` (peak bytes, B over A), `outcome` or `verdict`."""
    name: str
    before: str
    after: str
    judged: str
    """`worse`, `same` or `better`."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def changes_of(
    first: str, second: str, results: Path, tolerance: float, own: Sequence[Path] = ()
) -> list[Change]:
    """Return the changes between two sides (`read_side`). `own`: additional ledger files.

    Raises `ConfigError` if the sides have no experiment in common.
    """
    sides = [read_side(side, results) for side in (first, second)]
    changes = compare_results(*sides, tolerance=tolerance, own=own)
    if not changes:
        raise ConfigError("compare", second, f"records of experiments that {first} has too")
    return changes


def read_side(text: str, results: Path) -> list[Record]:
    """Return the records of a side: a store's folder, or those in `results` whose commit begins with `text`."""
    folder = Path(text)
    if folder.is_dir():
        records = read_records(folder)
        if not records:
            raise ConfigError("compare", text, "a folder with records")
        return records
    records = read_records(results)
    found = [record for record in records if _commit(record).startswith(text)] if len(text) >= 4 else []
    if not found:
        known = ", ".join(sorted({_commit(record)[:9] for record in records if _commit(record)})) or "none"
        expected = f"a folder with records, or a commit of the records in {results}: {known}"
        raise ConfigError("compare", text, expected)
    return found


def compare_results(
    before: list[Record], after: list[Record], *, tolerance: float, own: Sequence[Path] = ()
) -> list[Change]:
    """Return the changes of every experiment measured on both sides, then of the claims' verdicts."""
    # An interrupted run does not show a change of its side.
    old, new = (by_key(records, without=("interrupted",)) for records in (before, after))
    changes = []
    for key in (key for key in new if key in old):
        changes += _experiment(old[key], new[key], tolerance)
    return changes + _verdicts(before, after, own) if changes else []


def _experiment(old: ExperimentRecord, new: ExperimentRecord, tolerance: float) -> list[Change]:
    name = new.name
    if old.outcome != new.outcome:
        judged = WORSE if old.outcome == "ok" else BETTER if new.outcome == "ok" else SAME
        before, after = (f"{r.outcome} {r.reason}".strip() for r in (old, new))
        return [Change("outcome", name, before, after, judged)]
    changes = []
    ratio = speed_ratio(old, new)
    if ratio is not None:
        value, low, high = ratio
        judged = WORSE if high < 1 - tolerance else BETTER if low > 1 + tolerance else SAME
        before, after = (f"{units.number(r.metrics['samples_per_s'])} samples/s" for r in (old, new))
        changes.append(Change("speed", name, before, after, judged, value, low, high))
    sizes = [record.metrics.get("memory.peak_bytes", 0) for record in (old, new)]
    if all(sizes):
        grown = sizes[1] / sizes[0]
        judged = WORSE if grown > 1 + tolerance else BETTER if grown < 1 - tolerance else SAME
        before, after = map(units.size, sizes)
        changes.append(Change("memory", name, before, after, judged, grown))
    return changes


def speed_ratio(
    old: ExperimentRecord, new: ExperimentRecord, seed: int = 0
) -> tuple[float, float, float] | None:
    """Return the ratio new/old of samples/s with an unpaired 95 % bootstrap interval over both sides' timed steps.

    The result is None with fewer than three steps on a side.
    """
    import numpy as np

    steps = [[s for turn in record.series.step_seconds or () for s in turn] for record in (old, new)]
    if min(map(len, steps)) < 3:
        return None
    draw = np.random.default_rng(seed)
    drawn = [np.median(draw.choice(np.asarray(side), size=(2000, len(side))), axis=1) for side in steps]
    low, high = np.quantile(drawn[0] / drawn[1], (0.025, 0.975))
    return median(steps[0]) / median(steps[1]), float(low), float(high)


def _verdicts(before: list[Record], after: list[Record], own: Sequence[Path]) -> list[Change]:
    from repro.claims.judge import judge
    from repro.claims.reader import load_ledger

    ledger = load_ledger(own=tuple(own))
    old, new = ({r.claim.id: r.verdict for r in judge(ledger, records)} for records in (before, after))
    both = ((claim, old[claim], verdict) for claim, verdict in new.items() if verdict != old[claim])
    return [Change("verdict", *change, _judge_verdicts(*change[1:])) for change in both]


def _judge_verdicts(old: str, new: str) -> str:
    """Compare two verdicts; a verdict that is missing on one side gives `same`."""
    from repro.claims.verdicts import BAD, GOOD, POSSIBLE

    rank = {**dict.fromkeys(BAD, 0), POSSIBLE: 1, **dict.fromkeys(GOOD, 2)}
    if old not in rank or new not in rank or rank[old] == rank[new]:
        return SAME
    return BETTER if rank[new] > rank[old] else WORSE


def _commit(record: Record) -> str:
    return str((record.provenance.get("git") or {}).get("commit") or "")


def print_comparison(
    first: str,
    second: str,
    results: Path,
    tolerance: float,
    json: bool,
    details: bool,
    own: Sequence[Path] = (),
) -> int:
    """Print the changes; return 1 if one is worse, else 0. Raises `ConfigError` for an invalid tolerance or side."""
    require(0 <= tolerance < 1, "--tolerance", tolerance, "a part of 1, 0.05 for 5 %")
    changes = changes_of(first, second, results, tolerance, own)
    worse = sum(change.judged == WORSE for change in changes)
    if json:
        print_json({"changes": [asdict(change) for change in changes], "worse": worse})
    else:
        _print_changes(changes, None if details else MAX_CHANGES)
    return 1 if worse else 0


def _print_changes(changes: Sequence[Change], most: int | None) -> None:
    """Print the totals, then up to `most` changes, worse ones first; None: all, with equal speeds."""
    order = (WORSE, SAME, BETTER)
    counts = ", ".join(f"{sum(c.judged == judged for c in changes)} {judged}" for judged in order)
    wrap = ("before", "after")
    made = new_table("change", "of", "name", "ratio (interval)", *wrap, left=6, wrap=wrap)
    shown = [c for c in changes if c.judged != SAME or (most is None and c.kind == "speed")]
    for c in sorted(shown, key=lambda c: (WORSE, BETTER, SAME).index(c.judged))[:most]:
        ratio = units.ratio(c.ratio, c.low, c.high) if c.ratio else ""
        made.add_row(c.judged, c.kind, c.name, ratio, c.before, c.after)
    more = "--details lists all changes, and equal speeds."
    print_page(stdout(PAGE_COLUMNS), f"Changes: {counts}.", made, more if most is not None else "")
