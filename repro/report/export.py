"""`repro export` writes tables of results for programs and papers, and `repro artifact` the artifact appendix.

The appendix lists the command, expected value, tolerance and GPU-hours of every claim. It depends on the files of
published claims and on the suites, not on records, so that a checkout always gives the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.claims import run_commands
from repro.claims.independence import count_independent
from repro.claims.judge import judge
from repro.claims.ledger import ITSELF, KINDS
from repro.claims.published import append_unit
from repro.claims.reader import load_ledger
from repro.claims.run_commands import EvidenceCommand, SuiteCatalogue
from repro.claims.verdicts import NOT_COMPARABLE, ClaimResult, RowResult
from repro.config import ConfigError, Experiment, require
from repro.config.words import count_noun
from repro.measure.local_system import load_system
from repro.model import counts
from repro.report.views import row_view
from repro.results.metrics import STEP_SECONDS
from repro.results.reference_records import write_reference
from repro.results.store import print_remarks, read_records
from repro.util import files
from repro.util.extras import missing_package_hint
from repro.util.units import NO_VALUE, number

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet", "markdown", "latex")
TABLES = ("headlines", "summary", "claims", "values", "experiments", "comparisons", "records", "unknowns")
REFERENCE = "reference"
"""Name of the exported table of measurements that other results folders can use as references, in JSON lines."""
CLAIM_TABLES = ("headlines", "claims", "values")
"""Names of the exported tables to which `--claims` applies, since each row belongs to a claim."""
PAGE_COLUMNS = {
    "summary": ("about", "claims", "reproduced", "possible", "not reproduced", "not run"),
    "claims": ("claim", "published", "analytic", "simulated", "measured", "verdict"),
    "values": ("claim", "value", "published", "simulated", "measured", "verdict"),
    "experiments": ("name", "evidence", STEP_SECONDS, "mfu", "memory.peak_bytes", "outcome"),
    "comparisons": ("subject", "baseline", "metric", "ratio", "low", "high"),
    "records": ("id", "suite", "name", "evidence", "outcome", "written"),
    "unknowns": ("unknown", "low", "high", "rows", "settles", "possible"),
}
"""Default columns of each table that is exported as Markdown or LaTeX, at most six, which fit a page of a paper."""
COLUMN_UNITS = {
    "_bytes": ("GB", 1e9),
    "_seconds.median": ("s", 1.0),
    "mfu": ("%", 0.01),
    "mfu_causal": ("%", 0.01),
}
"""Printed unit of a column in Markdown and LaTeX tables, and its size in base units, by the end of the column name."""


def write_table(
    results: Path,
    table: str,
    form: str,
    output: Path | None,
    own: Sequence[Path] = (),
    claims: Sequence[str] = (),
    columns: str = "",
) -> int:
    """Write one table of the records in `results` to the file `output`, or to standard output if it is None; return 0.

    The format parquet and the table `reference` need a file. `own`: additional files of published claims.
    `claims`: globs of claim ids, for tables with a row per claim. `columns`: names, separated by commas; empty: all
    columns, but for Markdown and LaTeX default columns with values. Raises `ConfigError` for invalid input.
    """
    require(table in (*TABLES, REFERENCE), "--table", table, f"one of {', '.join((*TABLES, REFERENCE))}")
    if table == REFERENCE:
        if output is None:
            raise ConfigError("--output", "", "a file for the reference records (JSON lines)")
        count = write_reference(read_records(results), output)
        print(f"{count_noun(count, 'record')} in {output}.")
        return 0
    require(form in FORMATS, "--format", form, f"one of {', '.join(FORMATS)}")
    if form == "parquet" and output is None:
        raise ConfigError("--output", "", "a file, since parquet is a binary format")
    if claims and table not in CLAIM_TABLES:
        says = f"cannot be combined with --table {table}, only with {', '.join(CLAIM_TABLES)}"
        raise ConfigError("--claims", claims[0], says=says)
    frame = build_table(results, table, own, claims)
    chosen = [name.strip() for name in columns.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in frame]:
        raise ConfigError("--columns", unknown[0], f"one of {', '.join(map(str, frame))}")
    if form in ("markdown", "latex"):
        by_default = [name for name in PAGE_COLUMNS.get(table, frame) if name in frame]
        frame = _with_units(frame, chosen or [name for name in by_default if frame[name].notna().any()])
    elif chosen:
        frame = frame[chosen]
    if frame.empty:
        print(f"note: the table is empty, because the folder {results} has no {table}", file=sys.stderr)
    if form == "parquet":
        assert output is not None
        _parquet(frame, output)
        return 0
    text = _WRITERS[form](frame)
    if output is None:
        sys.stdout.write(text)
    else:
        files.write_file(output, text)
    return 0


def build_table(
    results: Path, table: str, own: Sequence[Path] = (), claims: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the export table named `table` of the records in `results`; `claims`: globs of claim ids."""
    import pandas as pd

    from repro.report import evidence

    found = evidence.read_store(results, own)
    print_remarks(found.torn)
    build = getattr(found, "provenance" if table == "records" else table)
    frames: list[pd.DataFrame] = (
        [build(glob) for glob in claims or ("*",)] if table in CLAIM_TABLES else [build()]
    )
    for glob, frame in zip(claims, frames, strict=False):
        right = f"a glob that matches ids of the table {table}; `repro claims --all` lists all ids"
        require(not frame.empty, "--claims", glob, right)
    return pd.concat(frames, ignore_index=True).drop_duplicates() if len(frames) > 1 else frames[0]


def _with_units(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the given columns of a data frame with numbers of three digits, and units in the headers or the cells."""
    found = {}
    units = frame["unit"] if "unit" in frame and "unit" not in columns else [""] * len(frame)
    for name in columns:
        end = next((end for end in COLUMN_UNITS if name.endswith(end)), "")
        unit, size = COLUMN_UNITS.get(end, ("", 0.0))
        heading = name.removesuffix(end if end.startswith("_") else "").replace(".", " ")
        cells = [_cell(value, size, each) for value, each in zip(frame[name], units, strict=True)]
        found[f"{heading} ({unit})" if unit else name] = cells
    return type(frame)(found)


def _cell(value: Any, size: float, unit: str) -> Any:
    """Return a number divided by `size` as text of three digits with its unit; return other values unchanged."""
    if isinstance(value, float | int) and value == value and (size or isinstance(value, float)):
        return append_unit(number(value / (size or 1.0)), unit)
    return value


def _markdown(frame: pd.DataFrame) -> str:
    """Return a data frame as a Markdown table."""
    shown = _filled(frame)
    cells = shown.map(lambda value: str(value).replace("|", "\\|") if isinstance(value, str) else value)
    return str(cells.to_markdown(index=False)) + "\n"


def _latex(frame: pd.DataFrame) -> str:
    """Return a data frame as a LaTeX table with the rules of the package booktabs."""
    shown = _filled(frame).style.hide(axis="index").format(escape="latex")
    table = shown.format_index(escape="latex", axis=1).to_latex(hrules=True)
    return f"% \\usepackage{{booktabs}}\n{table.replace(NO_VALUE, '--')}"


def _filled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a data frame with an empty cell for each missing value."""
    filled = frame.astype(object)
    return filled.where(filled.notna(), "")


def _parquet(frame: pd.DataFrame, output: Path) -> None:
    # A parquet column has one type, so columns that mix numbers with words such as "inf" are written as text.
    mixed = [name for name in frame if frame[name].map(type).nunique() > 1 and frame[name].dtype == object]
    typed = frame.assign(**{str(name): frame[name].map(_text) for name in mixed})
    try:
        typed.to_parquet(output, index=False)
    except ImportError:
        raise ConfigError("--format", "parquet", says=missing_package_hint("pyarrow")) from None


def _text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)


_WRITERS: dict[str, Callable[[pd.DataFrame], str]] = {
    "csv": lambda frame: str(frame.to_csv(index=False)),
    "markdown": _markdown,
    "latex": _latex,
}


HOUR_S = 3600.0
INTRODUCTION = """\
# Artifact appendix

This appendix lists every claim with the command that tests it, the expected value, its tolerance, and the cost in
GPU-hours on the required cluster. `make artifact` writes this file from the claims (`repro/claims/*.toml`) and the
suites (`suites/*.toml`), and a test compares the file with them.

- **Without a GPU**, `make smoke` (two cores, minutes) measures scaled-down twins and simulates all published layouts.
  The simulated commands below take a few seconds for each experiment.
- **On a cluster**, `repro submit` runs the measured commands. The lower end of the cost is the arithmetic of the steps
  at the device's peak rate, and the upper end is the sum of the experiments' time limits.
  `repro submit SUITE --profile PROFILE --dry-run` predicts the cost from simulated records.
- **Tolerance** is the accepted difference by kind of evidence, by the rule in `repro/claims/tolerance.py`. Analytic
  values need no run: `repro claims ID` computes them.
"""


def write_appendix(output: Path | None, own: Sequence[Path] = ()) -> int:
    """Write the artifact appendix to `output`, or print it if `output` is None. `own`: additional files of claims."""
    if output is None:
        sys.stdout.write(appendix(own))
    else:
        files.write_file(output, appendix(own))
    return 0


def appendix(own: Sequence[Path] = ()) -> str:
    """Return the artifact appendix as Markdown: all claims with commands and costs. `own`: further files of claims."""
    ledger, catalogue = load_ledger(own=tuple(own)), SuiteCatalogue()
    results = judge(ledger, [])
    parts = [INTRODUCTION, _independent(results), _overview(results, catalogue)]
    groups: dict[str, list[ClaimResult]] = {}
    for result in results:
        groups.setdefault(ledger.about[result.claim.file], []).append(result)
    for about, members in groups.items():
        parts += [f"## {about}\n", *(_claim(result, catalogue) for result in members)]
    return "\n".join(parts)


def gpu_hours(found: EvidenceCommand, catalogue: SuiteCatalogue) -> tuple[float | None, float]:
    """Return the minimum and maximum of the GPU-hours of a command that measures evidence for claims.

    The minimum is the time of the training steps' arithmetic at the device's peak rate, and None if this rate is
    unknown. The maximum is the sum of the experiments' time limits.
    """
    known = catalogue.suites[found.suite]
    chosen = [entry for entry in known.entries if entry.experiment.name in found.names]
    # An experiment whose expected outcome is out of memory completes no step, so its minimum is 0.
    least = [_arithmetic_hours(entry.experiment) if entry.expect != "oom" else 0.0 for entry in chosen]
    most = sum(e.experiment.limits.timeout_s * e.experiment.layout.world / HOUR_S for e in chosen)
    return None if None in least else sum(hours or 0.0 for hours in least), most


def _arithmetic_hours(experiment: Experiment) -> float | None:
    """Return the GPU-hours of an experiment's training steps at the device's peak FLOP rate; None if it is unknown."""
    layout, training = experiment.layout, experiment.training
    peak = load_system(experiment.system).device.peak_flops.get(layout.precision)
    if peak is None or peak.value is None:
        return None
    work = counts.hardware_flops(experiment.model, experiment.seq, layout.global_batch, layout.recompute)
    return work * training.steps / float(peak.value) / HOUR_S


def _overview(results: list[ClaimResult], catalogue: SuiteCatalogue) -> str:
    """Return a Markdown table of the GPU-hours of all measurements for claims, with one row per suite and system."""
    wanted = [entry for result in results for entry in run_commands.experiments_of(result.claim.rows)]
    lines = ["| suite | needs | experiments | GPU-hours |", "|---|---|---|---|"]
    for found in catalogue.commands(dict.fromkeys(wanted)):
        if found.kind == "measured":
            cells = found.suite, found.needs or "this machine", len(found.names), _hours(found, catalogue)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(["## Cost of the measurements\n", *lines, ""])


def _independent(results: list[ClaimResult]) -> str:
    """Return a paragraph with the numbers of claims, of their values, and of the distinct quantities tested."""
    found = count_independent(results, possible=True)
    kinds = ", ".join(f"{found[kind].tested} {kind}" for kind in KINDS)
    rows = [row.findings for result in results for row in result.rows]
    itself = sum(all(finding.itself for finding in findings) for findings in rows if findings)
    tested = sum(found[kind].tested for kind in KINDS)
    return f"""\
{len(results)} claims have {len(rows)} values. Several values may repeat one formula or one run: {tested} independent
quantities can be tested ({kinds}; `repro/claims/independence.py` counts them). {itself} values can only be compared
with formulas and numbers of their source: their verdict is `follows` or `inconsistent`, never `reproduced`.
A predicted time that misses is `possible` if the interval from uncertain inputs contains the published value.
"""


def _claim(result: ClaimResult, catalogue: SuiteCatalogue) -> str:
    claim = result.claim
    lines = [f"### {claim.id}", "", f"{claim.title}. Published: {claim.published}."]
    if result.verdict == NOT_COMPARABLE:
        lines += ["", f"Not comparable: {result.reason}."]
        if not any(row.findings for row in result.rows):
            return "\n".join([*lines, ""])
    lines += ["", "| value | expected | tolerance |", "|---|---|---|"]
    lines += [_row(row, result) for row in result.rows]
    commands = [*catalogue.commands(run_commands.experiments_of(claim.rows))]
    commands += [*run_commands.evaluation_commands(claim), *run_commands.device_commands(claim)]
    lines += ["", "```", *(f"{command.text}    # {_note(command, catalogue)}" for command in commands)]
    lines += [f"repro claims {claim.id}", "```"]
    if claim.needs:
        lines += ["", f"Needs: {claim.needs}."]
    return "\n".join([*lines, ""])


def _row(row: RowResult, result: ClaimResult) -> str:
    view = row_view(row, result.claim)
    if row.verdict == NOT_COMPARABLE and not row.findings:
        return f"| {_plain(view['label'])} | {_plain(view['published'])} | not comparable: {_plain(row.reason)} |"
    rules: dict[str, list[str]] = {}
    for finding in sorted(row.findings, key=lambda finding: KINDS.index(finding.kind)):
        rules.setdefault(finding.tolerance, []).append(ITSELF if finding.itself else finding.kind)
    rule = "; ".join(f"{', '.join(dict.fromkeys(kinds))}: {rule}" for rule, kinds in rules.items())
    return f"| {_plain(view['label'])} | {_plain(view['published'])} | {_plain(rule) or 'not tested yet'} |"


def _note(found: EvidenceCommand, catalogue: SuiteCatalogue) -> str:
    if not found.suite:
        return found.needs
    if found.kind == "simulated":
        return f"{count_noun(len(found.names), 'simulation')} on this machine"
    on_gpus = f"{found.needs}, {_hours(found, catalogue)} GPU-hours"
    return on_gpus if found.needs else "on processors of this machine"


def _hours(found: EvidenceCommand, catalogue: SuiteCatalogue) -> str:
    if found.suite not in catalogue.suites or not found.needs:
        return "0"
    least, most = gpu_hours(found, catalogue)
    return f"{'?' if least is None else number(least)} to {number(most)}"


def _plain(words: str) -> str:
    """Return text with the characters escaped that end a cell of a Markdown table."""
    return words.replace("|", "\\|").replace("\n", " ")
