"""Output of `repro results` and `repro run`: tables of stored experiments, summaries of runs, and planned runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from repro.claims.verdicts import NOT_RUN
from repro.config import words
from repro.config.errors import ConfigError, require
from repro.config.suites import load_suite
from repro.results.metrics import DEVICE_FLOPS_PER_S, STEP_SECONDS
from repro.results.schema import EMULATED, MEASURED, SIMULATED, ComparisonRecord
from repro.results.select import select
from repro.results.store import Store, read_records
from repro.results.tables import (
    ComparableResults,
    comparable_results,
    comparison_row,
    experiment_row,
    results_of_run,
)
from repro.simulate.time.calibration import BASIS_LABELS, basis_of_record
from repro.util import files, units
from repro.util.console import (
    MIN_TABLE_COLUMNS,
    PAGE_COLUMNS,
    new_table,
    print_json,
    print_page,
    sparkline,
    stdout,
)

if TYPE_CHECKING:
    from repro.launch.run import ExperimentPreview

EVIDENCE_TITLES = {
    MEASURED: "measured: real processes and collectives",
    EMULATED: "emulated: scaled-down runs on a throttled network; compare ratios of speeds, not speeds",
    SIMULATED: "simulated: predictions from a trace of the step",
}
WORD_COLUMNS, COUNT_COLUMNS = ("model", "system", "engine", "precision"), ("global_batch", "micro_batch")
"""Experiment conditions with a table column only if their values differ: left-aligned words, right-aligned numbers."""
MAX_ROWS, MAX_SHORT_GROUPS, MAX_GROUP_ROWS, MAX_LINES = 14, 3, 18, 3
"""Maximum numbers in the output without `--details`: rows of experiments, suites with a table each, suites with a row
each, and lines of failures, of comparisons and of reasons why experiments cannot run."""


class Column(NamedTuple):
    """Column of a printed table: a heading of at most two lines, and a text for every row."""

    heading: str
    cells: list[str]
    left: bool = False
    is_main: bool = False
    """Whether the column of the table is printed without `--details`."""
    note: str = ""
    """Explanation of the column that is printed below its table; empty for none."""

    @property
    def width(self) -> int:
        """Width of a printed table's column in characters."""
        return max(len(line) for line in [*self.heading.split("\n"), *self.cells])

    @property
    def empty(self) -> bool:
        """Whether no row of the table has a value in this column."""
        return not any(cell not in ("", units.NO_VALUE) for cell in self.cells)


def print_results(what: str, results: Path, json: bool, plot: Path | None, details: bool) -> int:
    """Print the results of a suite or of a glob of experiments (`what`). Raises `ConfigError` if there are none."""
    selection = select(read_records(results))
    pattern = load_suite(Path(what)).name if what.endswith(".toml") else what
    found = comparable_results(selection, pattern)
    if not found:
        here = ", ".join(sorted({record.suite for record in selection.by_name.values()}))
        if not here:
            says = f"no records in {results}; run experiments with `repro run`, or name another folder by --results"
            raise ConfigError("results", says=says)
        raise ConfigError(
            "results", what, f"a suite or a glob of experiments with results in {results}: {here}"
        )
    if plot is not None:
        _write_curves(found, plot)
    if json:
        print_json(_document(found))
    elif len(found) > MAX_SHORT_GROUPS and not details:
        _print_groups(found)
    else:
        print_result_tables(found, details=details)
    return 0


def _print_groups(found: Sequence[ComparableResults]) -> None:
    """Print how many experiments, failures and pairwise comparisons each suite has, by kind of evidence."""
    made = new_table("suite", "evidence", "experiments", "failures", "comparisons", left=2)
    for group in found[:MAX_GROUP_ROWS]:
        failures = sum(record.outcome != "ok" for record in group.records)
        counts = len(group.records), failures, len(group.comparisons)
        made.add_row(group.suite, group.evidence, *map(str, counts))
    more = f" --details lists {len(found) - MAX_GROUP_ROWS} more rows." if found[MAX_GROUP_ROWS:] else ""
    text = f"{sum(len(group.records) for group in found):,} experiments, by suite and kind of evidence.{more}"
    print_page(text, made, command=f"repro results {found[0].suite}")


def print_result_tables(
    found: Sequence[ComparableResults], *, details: bool = False, rows: int = MAX_ROWS
) -> None:
    """Print experiments, failures and pairwise comparisons by suite and evidence, in `rows` lines without `details`."""
    console = stdout(PAGE_COLUMNS)
    for group in found:
        failures = [record for record in group.records if record.outcome != "ok"]
        lines = None if details else MAX_LINES // len(found)
        compared = group.comparisons[:lines]
        used = len(compared) + len(failures[:lines]) + 2 * bool(compared)
        most = None if details else max(2, (rows - 8 * (len(found) - 1)) // len(found) - used)
        count = words.count_noun(len(group.records), "experiment")
        outcomes = Counter(record.outcome for record in failures)
        failed = "".join(f" {count} {outcome}." for outcome, count in outcomes.items())
        print_page(f"{group.suite}, {count}, {EVIDENCE_TITLES[group.evidence]}.{failed}")
        _print_experiments(console, group, most)
        hidden = len(group.records) - (most or len(group.records))
        reasons = [f"{record.name}: {record.outcome}: {units.readable(record.reason)}" for record in failures]
        if not details:
            reasons = [shorten(reason, PAGE_COLUMNS, placeholder=" ...") for reason in reasons[:lines]]
        more = f"Smallest model first, then fastest; --details lists {hidden} more." if hidden > 0 else ""
        print_page(more, *reasons)
        _print_comparisons(compared)
        console.print()


def _print_experiments(console: Console, group: ComparableResults, most: int | None) -> None:
    """Print the experiments of a suite in one table, or in several tables if one would be wider than the terminal.

    `most`: maximum number of rows, in which case only the main columns are printed; None: all rows and columns.
    """
    name, blocks = _columns(console, group)
    gap = 2 if console.width >= PAGE_COLUMNS else 1
    tables: list[list[Column]] = [[]]
    for block in blocks:
        columns = [column for column in block if not column.empty and (most is None or column.is_main)]
        needed = sum(column.width + gap for column in [name, *tables[-1], *columns]) - gap
        if needed > console.width >= MIN_TABLE_COLUMNS:
            tables.append([])
        tables[-1] += columns
    for columns in [columns for columns in tables if columns]:
        every = [name, *columns]
        left = {column.heading for column in every if column.left}
        cells = list(zip(*(column.cells for column in every), strict=True))[:most]
        headings = (column.heading for column in every)
        print_page(new_table(*headings, left=left, wrap=(name.heading,), gap=gap, rows=cells))
    notes = [column.note for columns in tables for column in columns if column.note]
    print_page("; ".join(dict.fromkeys(notes)))


REPEATED_REDUCTION = (
    "ZeRO 2 and 3 reduce gradients in every micro-batch, so with m micro-batches ZeRO 2 sends (m + 1)/2 times the "
    "bytes of ZeRO 1"
)


def _columns(console: Console, group: ComparableResults) -> tuple[Column, list[list[Column]]]:
    """Return the column of experiment names, and groups of columns that one table must not separate."""
    rows = [experiment_row(record) for record in group.records]
    bases = [basis_of_record(record) for record in group.records]
    varied = [key for key in (*WORD_COLUMNS, *COUNT_COLUMNS) if len({row[key] for row in rows}) > 1]
    losses = [record.series.loss or [] for record in group.records]
    parts = ("parameters", "gradients", "optimizer", "activations", "peak")
    axes = words.axes(record.experiment.layout for record in group.records)
    values_of = {part: [row.get(f"memory.{part}_bytes") for row in rows] for part in parts}
    sent, steps = [row.get("comm.sent_bytes") for row in rows], [row.get(STEP_SECONDS) for row in rows]
    rates = [row.get(DEVICE_FLOPS_PER_S) for row in rows]
    peaks = [row.get("memory.peak_bytes") for row in rows if row["outcome"] == "ok"] or values_of["peak"]
    (gb, byte), (sent_in, sent_byte) = (units.common_unit(v, "B") for v in (peaks, sent))
    (s, second), (flops, flop) = units.common_unit(steps, "s"), units.common_unit(rates, "FLOP/s")
    timed = zip(rows, _numbers(steps, second), strict=True)
    times = [time if row["outcome"] == "ok" else row["outcome"] for row, time in timed]
    degrees = [" x ".join(str(row[axis]) for axis in axes) for row in rows]
    nats = [f"{row['loss.last']:.4f}" if "loss.last" in row else "" for row in rows]
    curves = [sparkline(console, loss) if len(loss) > 1 else "" for loss in losses]
    tokens = _numbers([row.get("tokens_per_s") for row in rows], 1.0)
    layouts = [record.experiment.layout for record in group.records]
    is_repeated = any(one.zero >= 2 and one.accumulation > 1 and one.copies > 1 for one in layouts)
    traffic = "sent: bytes that rank 0 sends in a step" + f"; {REPEATED_REDUCTION}" * is_repeated
    memory = "memory: bytes on the fullest rank, of model states between two steps"
    return Column("experiment", [row["name"] for row in rows], left=True), [
        [
            Column(key.replace("_", "\n"), [str(row[key]) for row in rows], left=key in WORD_COLUMNS)
            for key in varied
        ],
        [
            Column(" x ".join(axes), degrees, is_main=True),
            Column("ZeRO", [str(row["zero"]) for row in rows], is_main=True),
        ],
        [
            Column("loss\n(nats)", nats, is_main=True, note="loss: loss of the last step"),
            Column("loss\ncurve", curves, left=True),
        ],
        [
            Column(f"step\n({s})", times, is_main=True,
                   note="step: median step time of the slowest rank"),
            Column("throughput\n(tokens/s)", tokens, is_main=True),
            Column(f"rate per\nrank ({flops})", _numbers(rates, flop), note="rate: FLOP/s with recomputation"),
            Column("MFU\n(%)", _numbers([row.get("mfu") for row in rows], 0.01), is_main=True,
                   note="MFU: model FLOP utilization, with attention counted in full"),
            Column("basis of\nspeed", [BASIS_LABELS[basis] for basis in bases], left=True, is_main=True),
        ],
        [
            *(
                Column(f"{part}\n({gb})", _numbers(values, byte), is_main=part == "peak", note=memory)
                for part, values in values_of.items()
            ),
            Column(f"sent\n({sent_in})", _numbers(sent, sent_byte), note=traffic),
        ],
    ]  # fmt: skip


def _numbers(values: Sequence[float | None], unit: float) -> list[str]:
    """Return each value in units of `unit` as text of three significant digits, with at most three decimal places."""
    found = []
    for value in values:
        size = 0.0 if value is None else value / unit
        text = units.number(size) if size >= 0.01 or not size else f"{size:.3f}"
        found.append(units.NO_VALUE if value is None else text)
    return found


def _print_comparisons(compared: Sequence[ComparisonRecord]) -> None:
    """Print a table of ratios of alternately run experiments, with their 95 % bootstrap intervals."""
    grid = new_table("subject", "baseline", "metric", "ratio", "95 % interval", "rounds", left=3)
    for record in compared:
        is_known = record.low is not None and record.high is not None
        between = f"{record.low:.3f} to {record.high:.3f}" if is_known else units.NO_VALUE
        sides = record.subject.name, record.baseline.name, record.metric.replace("_per_", "/")
        grid.add_row(*sides, f"{record.ratio:.3f}", between, str(record.rounds))
    print_page(grid)


def _document(found: Sequence[ComparableResults]) -> dict[str, Any]:
    """Return the JSON document of `repro results`: experiments with metrics and loss curves, and comparisons."""
    return {
        "experiments": [
            {
                **experiment_row(record),
                "rests_on": basis_of_record(record) or None,
                "loss": record.series.loss or [],
            }
            for group in found
            for record in group.records
        ],
        "comparisons": [
            {**comparison_row(record), "evidence": group.evidence}
            for group in found
            for record in group.comparisons
        ],
    }


def _write_curves(found: Sequence[ComparableResults], path: Path) -> None:
    """Draw the loss curves of the experiments to `path`. Raises `ConfigError` if no experiment has a curve."""
    from repro.report.figures import loss_curves, style

    require(path.suffix in (".svg", ".png"), "--plot", str(path), "a file that ends in .svg or .png")
    with style.figure_style():
        drawing = loss_curves.draw_loss_curves([record for group in found for record in group.records])
    if drawing.figure is None:
        raise ConfigError("--plot", str(path), says=f"cannot be drawn: {drawing.caption}")
    files.write_file(path, style.to_png(drawing) if path.suffix == ".png" else style.to_svg(drawing))


def print_run(
    suites: list[Path], only: list[str], results: Path, rerun: bool, json: bool, details: bool, **how: Any
) -> int:
    """Run the experiments of `suites` that have no record in the store, and print a summary of each suite.

    Returns 0 if every experiment that can run has the outcome that its suite expects, else 1; after a signal 128 plus
    its number. Raises `ConfigError` for invalid input, before any experiment starts.
    """
    from repro.launch.run import run_suites

    found = []
    for ended in run_suites(suites, only, results, rerun, **how):
        found.append(ended)
        if not json:
            print_run_summary(ended.summary, with_table=details or len(suites) == 1, details=details)
    if how.get("profile"):
        print(f"profiles: {results}/profiles", file=sys.stderr)
    if json:
        summaries = [ended.summary for ended in found]
        print_json(summaries if len(suites) > 1 else summaries[0])
    return max(ended.code for ended in found)


def print_run_summary(summary: dict[str, Any], *, with_table: bool, details: bool) -> None:
    """Print the outcomes of a suite's run, unexpected outcomes, missing requirements, and `with_table` the results."""
    rows = summary["experiments"]
    for remark in summary["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
    wrong = [row for row in rows if row["expected"] is False]
    missing = [row for row in rows if row["outcome"] == NOT_RUN and row["expected"] is None]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary["counts"].items())
    possible = " that can run here" if summary["evidence"] == MEASURED else " that can be simulated"
    judged = f"{len(wrong)} not as expected" if wrong else f"all{possible * bool(missing)} as expected"
    what = "experiment" if summary["evidence"] == MEASURED else f"{summary['evidence']} experiment"
    lines = [f"{summary['suite']}: {words.count_noun(len(rows), what)}: {counts}; {judged}"]
    lines += [f"stopped: {summary['stopped']}; repeat the command to continue"] * bool(summary["stopped"])
    for row in wrong[:MAX_LINES]:
        logs = f"  logs: {row['logs']}" * bool(row["logs"])
        lines.append(f"{row['name']}: {row['outcome']}  {units.readable(row['reason'])}{logs}")
    lines += [f"--json lists {len(wrong) - MAX_LINES} more unexpected outcomes"] * (len(wrong) > MAX_LINES)
    lines += reason_lines([row["reason"] for row in missing])
    shown = f"repro results {summary['suite']}{words.results_option(summary['results'])}"
    lines.append(f"records: {summary['results']}/records; `{shown}` shows them")
    print("\n".join(lines))
    if with_table:
        print()
        names = [row["name"] for row in rows]
        records, _ = Store(Path(summary["results"])).readable()
        found = results_of_run(select(records), summary["suite"], names, summary["evidence"])
        print_result_tables(found, details=details, rows=MAX_ROWS - 1 - len(lines))


def reason_lines(reasons: Sequence[str]) -> list[str]:
    """Return a line for each frequent reason why experiments cannot run on this machine, with their number."""
    counts = Counter(reason.partition("; ")[0] for reason in reasons).most_common()
    lines = [f"not run: {words.count_noun(n, 'experiment')}: {reason}." for reason, n in counts[:MAX_LINES]]
    if others := sum(count for _, count in counts[MAX_LINES:]):
        lines.append(f"not run: {others} more experiments, with reasons that --json lists.")
    if can := sum(f"--evidence {SIMULATED}" in reason for reason in reasons):
        lines.append(f"`--evidence {SIMULATED}` can simulate {can} of these experiments on this machine.")
    return lines


def print_dry_run(found: Sequence[ExperimentPreview], json: bool, details: bool) -> int:
    """Print which experiments `repro run` would execute: counts by state, time, with `details` a row each; return 0."""
    from repro.launch.run import ELSEWHERE, KNOWN, TO_RUN

    if json:
        print_json([asdict(each) for each in found])
        return 0
    todo, counts = [each for each in found if each.state == TO_RUN], Counter(each.state for each in found)
    answer = ", ".join(f"{counts[state]} {state}" for state in (TO_RUN, KNOWN, ELSEWHERE))
    known = [each.last_s for each in todo if each.last_s is not None]
    timed, new = (words.count_noun(count, "experiment") for count in (len(known), len(todo) - len(known)))
    times = [f"{units.seconds(sum(known))} for {timed} by the durations of their last runs"] * bool(known)
    times += [f"no estimate for {new} without an earlier run"] * (len(known) < len(todo))
    print_page(f"{words.count_noun(len(found), 'experiment')}: {answer}.")
    print_page(f"Estimated time: {'; '.join(times) or '0 s'}.")
    print_page(*reason_lines([each.where for each in found if each.state == ELSEWHERE]))
    if not details:
        rows = new_table("processes", "experiments", "steps")
        for where in list(dict.fromkeys(each.where for each in todo))[:MAX_ROWS]:
            some = [each for each in todo if each.where == where]
            rows.add_row(where, str(len(some)), str(sum(each.steps for each in some)))
        print_page(rows, "--details lists every experiment with its memory or time limit.")
        return 0
    local = new_table("experiment", "state", "processes", "steps", "last run (s)", "timeout (s)", left=3)
    other = new_table("experiment", "state", "processes", "memory per device", left=4, wrap=("processes",))
    is_one = len({each.suite for each in found}) == 1
    for each in found:
        name = each.name if is_one else f"{each.suite}/{each.name}"
        last = units.number(each.last_s) if each.last_s is not None else units.NO_VALUE
        limit = f"{each.limit_s:g}" if each.limit_s else units.NO_VALUE
        cells = (each.memory,) if each.memory else (str(each.steps), last, limit)
        table = other if each.memory else local
        table.add_row(name, each.state, each.where.partition("; ")[0], *cells)
    print_page(local, other)
    return 0
