"""`repro compare A B`: compare the results of the same experiments in two results folders or from two git commits.

Step times differ more between launches of an experiment than within one, so the interval of a speed ratio comes from
pairs of launches. Each launch counts by its shortest step, because other programs can only lengthen a step.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import repro
from repro.config.errors import ConfigError, require
from repro.config.suites import load_suite
from repro.config.words import count_noun
from repro.measure.statistics import RatioInterval, ratio_interval
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import by_key, launches_by_key
from repro.results.store import read_records
from repro.util import units
from repro.util.console import new_table, print_json, print_page

WORSE, SAME, BETTER, UNDECIDED = "worse", "same", "better", "not decided"
MIN_LAUNCHES = 6
"""Minimum number of launches of an experiment on each compared side; with fewer, its speed change is not decided. The
interval of a median of n ratios from the smallest to the largest has an error probability of 2^(1-n), 3 % for n = 6."""
MAX_LAUNCHES = 30
"""Default maximum number of times that `repro compare --suite` runs the suite in each commit."""
MAX_CHANGES = 8
"""Maximum number of changed results that `repro compare` prints without `--details`; each has at most two lines."""


@dataclass(frozen=True)
class Change:
    """Difference between results A (`before`) and results B (`after`) in one experiment or in a claim's verdict."""

    kind: str
    """Compared quantity: `speed` in samples/s, `memory` in peak bytes, `outcome` or `verdict`."""
    name: str
    before: str
    after: str
    judged: str
    """Judgement of a changed result: `worse`, `same`, `better`, or `not decided` (few launches, wide interval)."""
    ratio: float | None = None
    """Speed or peak memory, after over before, or None. `low`, `high`: ends of a speed ratio's 95 % interval."""
    low: float | None = None
    high: float | None = None


def read_side(text: str, results: Path) -> list[Record]:
    """Return the experiment records of one compared side: in folder `text`, or of git commit `text` in `results`."""
    folder = Path(text)
    if folder.is_dir():
        records = read_records(folder)
        require(records, "compare", text, "a folder with records")
        return records
    require(results.is_dir(), "--results", str(results), says="no such folder")
    records = read_records(results)
    # Names such as HEAD~1 or a branch need a git checkout; a commit hash is compared with the records directly.
    with suppress(ConfigError):
        text = _git("rev-parse", "--verify", f"{text}^{{commit}}")
    found = [record for record in records if _commit(record).startswith(text)] if len(text) >= 4 else []
    if not found:
        known = ", ".join(sorted({_commit(record)[:9] for record in records if _commit(record)})) or "none"
        expected = f"a folder with records, or a commit of the records in {results}: {known}"
        raise ConfigError("compare", text, expected)
    return found


def compare_results(
    before: list[Record], after: list[Record], *, tolerance: float, own: Sequence[Path] = ()
) -> list[Change]:
    """Return changes of experiments with records both `before` and `after`, then of claims whose verdicts differ."""
    changes = _compare_experiments(before, after, tolerance)
    return changes + _verdicts(before, after, own) if changes else []


def _compare_experiments(before: list[Record], after: list[Record], tolerance: float) -> list[Change]:
    # Omit interrupted runs: the interruption, not the compared versions of the code, determined their outcome.
    old, new = (by_key(records, without=("interrupted",)) for records in (before, after))
    launches = [launches_by_key(records) for records in (before, after)]
    changes = []
    for key in (key for key in new if key in old):
        speeds = [side.get(key, []) for side in launches]
        changes += _experiment(old[key], new[key], speeds, tolerance)
    return changes


def _experiment(
    old: ExperimentRecord, new: ExperimentRecord, launches: list[list[ExperimentRecord]], tolerance: float
) -> list[Change]:
    name = new.name
    if old.outcome != new.outcome:
        judged = WORSE if old.outcome == "ok" else BETTER if new.outcome == "ok" else SAME
        before, after = (f"{r.outcome} {r.reason}".strip() for r in (old, new))
        return [Change("outcome", name, before, after, judged)]
    changes = []
    ratio = speed_ratio(*launches)
    if ratio is not None:
        changed = judge_speed(ratio, tolerance)
        before, after = (
            f"{units.seconds(median(map(shortest_step, side)))} a step, {count_noun(len(side), 'launch')}"
            for side in launches
        )
        changes.append(Change("speed", name, before, after, changed, *ratio))
    sizes = [record.metrics.get("memory.peak_bytes", 0) for record in (old, new)]
    if all(sizes):
        grown = sizes[1] / sizes[0]
        judged = WORSE if grown > 1 + tolerance else BETTER if grown < 1 - tolerance else SAME
        before, after = map(units.size, sizes)
        changes.append(Change("memory", name, before, after, judged, grown))
    return changes


def judge_speed(ratio: RatioInterval, tolerance: float) -> str:
    """Return `better` or `worse` for a ratio interval outside 1 +- `tolerance`, `same` inside, else `not decided`."""
    if ratio.low is None or ratio.high is None:
        return UNDECIDED
    if ratio.high < 1 - tolerance:
        return WORSE
    if ratio.low > 1 + tolerance:
        return BETTER
    return SAME if 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance else UNDECIDED


def speed_ratio(old: Sequence[ExperimentRecord], new: Sequence[ExperimentRecord]) -> RatioInterval | None:
    """Return the median speed ratio new/old over pairs of launches of an experiment, with its 95 % interval.

    The speed of a launch is that of its shortest step. Launch i of `old` forms a pair with launch i of `new`. The
    interval is None with fewer than `MIN_LAUNCHES` pairs, and the result is None if a side has no step times.
    """
    pairs = list(zip(map(shortest_step, new), map(shortest_step, old), strict=False))
    if not pairs or not all(map(all, pairs)):
        return None
    found = ratio_interval(pairs)
    return found if len(pairs) >= MIN_LAUNCHES else RatioInterval(found.ratio, None, None)


def shortest_step(record: ExperimentRecord) -> float:
    """Return the shortest step time in the record of a launch, in seconds; 0 if the record has no step times."""
    return min((seconds for turn in record.series.step_seconds or () for seconds in turn), default=0.0)


def run_commits(
    commits: Sequence[str], suite: Path, launches: int, results: Path, tolerance: float
) -> list[str]:
    """Run a suite alternately with the code of two git commits, and return their new folders in `results`/compare.

    Each commit gets a temporary git worktree. The order of the commits changes with each launch (A B, B A, ...). The
    runs end when all changes are decided, or after `launches` runs of each commit. Raises `ConfigError` for an unknown
    commit, or for a suite that a commit rejects.
    """
    load_suite(suite)
    ids = [_git("rev-parse", "--short=9", "--verify", f"{commit}^{{commit}}") for commit in commits]
    place = results.resolve() / "compare" / f"{'-'.join(ids)}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Exit by an exception on SIGTERM, so that the `finally` clause removes the temporary git worktrees.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="repro-compare-"))
    sides = list(zip(ids, [folder / "a", folder / "b"], [place / "a", place / "b"], strict=True))
    try:
        for commit, tree, _ in sides:
            _git("worktree", "add", "--detach", str(tree), commit)
        for launch in range(launches):
            for commit, tree, store in sides[:: -1 if launch % 2 else 1]:
                print(f"launch {launch + 1} of {launches}: {commit}", file=sys.stderr, flush=True)
                _run_suite(commit, tree, suite.resolve(), store)
            before, after = (read_records(store) for _, _, store in sides)
            if all(c.judged != UNDECIDED for c in _compare_experiments(before, after, tolerance)):
                break
    finally:
        for _, tree, _ in sides:
            if tree.is_dir():
                _git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)
    return [str(store) for _, _, store in sides]


def _run_suite(commit: str, tree: Path, suite: Path, store: Path) -> None:
    """Run a suite once with the code in git worktree `tree`. Raises `ConfigError` if `repro run` of this code fails."""
    # Older commits do not support `python -m repro`.
    program = "import sys; from repro.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", str(suite), "--rerun", "--results", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # Code 1 means that an experiment failed, which is a valid result.
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError("compare", commit, says=f"`repro run {suite}` of this commit failed: {lines[-1]}")


def _git(*arguments: str) -> str:
    """Return the output of a git command in the checkout of this program. Raises `ConfigError` if git fails."""
    root = Path(repro.__file__).parents[1]
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        says = f"is not a commit of the checkout {root}; --suite needs two such commits"
        raise ConfigError("compare", arguments[-1].removesuffix("^{commit}"), says=says)
    return done.stdout.strip()


def _verdicts(before: list[Record], after: list[Record], own: Sequence[Path]) -> list[Change]:
    from repro.claims.judge import judge
    from repro.claims.reader import load_ledger

    ledger = load_ledger(own=tuple(own))
    old, new = ({r.claim.id: r.verdict for r in judge(ledger, records)} for records in (before, after))
    both = ((claim, old[claim], verdict) for claim, verdict in new.items() if verdict != old[claim])
    return [Change("verdict", *change, _judge_verdicts(*change[1:])) for change in both]


def _judge_verdicts(old: str, new: str) -> str:
    """Return `better` or `worse` for a claim's verdict `new` over `old`; `same` for equally good or unjudged ones."""
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
    suite: Path | None = None,
    launches: int = MAX_LAUNCHES,
) -> int:
    """Print how results change from `first` to `second` (folders or commits); return 1 if any is worse, else 0.

    `own`: additional files of published claims.
    `suite`: run this suite at most `launches` times in the commits `first` and `second` before the comparison.
    Raises `ConfigError` for invalid input, or if no experiment has records on both sides.
    """
    require(0 <= tolerance < 1, "--tolerance", tolerance, "a fraction below 1, such as 0.05 for 5 %")
    require(launches >= 1, "--launches", launches, "1 or more")
    if suite is not None:
        first, second = run_commits((first, second), suite, launches, results, tolerance)
    sides = [read_side(side, results) for side in (first, second)]
    changes = compare_results(*sides, tolerance=tolerance, own=own)
    require(changes, "compare", second, f"results with at least one experiment that {first} also has")
    worse = sum(change.judged == WORSE for change in changes)
    if json:
        print_json({"changes": [asdict(change) for change in changes], "worse": worse})
    else:
        _print_changes(changes, None if details else MAX_CHANGES)
    return 1 if worse else 0


def _print_changes(changes: Sequence[Change], most: int | None) -> None:
    """Print the number of changed results by judgement, then up to `most` (None: all) changes, worse ones first."""
    order = (WORSE, SAME, BETTER, UNDECIDED)
    counts = ", ".join(f"{sum(c.judged == judged for c in changes)} {judged}" for judged in order)
    wrap = ("before", "after")
    made = new_table("change", "of", "name", "ratio (interval)", *wrap, left=6, wrap=wrap)
    shown = [c for c in changes if c.judged != SAME or (most is None and c.kind == "speed")]
    for c in sorted(shown, key=lambda c: (WORSE, BETTER, UNDECIDED, SAME).index(c.judged))[:most]:
        ratio = units.ratio(c.ratio, c.low, c.high) if c.ratio else ""
        made.add_row(c.judged, c.kind, c.name, ratio, c.before, c.after)
    more = "--details lists all changes, and unchanged speeds." if most is not None else ""
    few = f"Not decided: fewer than {MIN_LAUNCHES} runs of A or B, or an interval wider than --tolerance. "
    few += "`repro run SUITE --rerun --results A` measures A once more. `repro compare COMMIT COMMIT --suite FILE` "
    few += f"runs both commits in turn until all intervals are narrow, or --launches times (default {MAX_LAUNCHES})."
    is_undecided = any(c.judged == UNDECIDED for c in changes)
    print_page(f"Changes: {counts}.", made, few * is_undecided, more)
