"""`repro artifact`: claim, command, expected value, tolerance and cost on the required cluster.

The appendix depends only on the ledger and the suites, not on records, so that a checkout always gives the same text.
The cost of a measured command is a range in GPU-hours. The lower end is the arithmetic of its steps at the device's
peak. The upper end is the sum of its experiments' time limits. `repro submit --dry-run` predicts the value in between
from simulated records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.claims.independence import count_independent
from repro.claims.judge import judge
from repro.claims.ledger import ITSELF, KINDS, Ledger
from repro.claims.reader import load_ledger
from repro.claims.run_commands import (
    EvidenceCommand,
    SuiteCatalogue,
    device_commands,
    evaluation_commands,
    experiments_of,
)
from repro.claims.verdicts import NOT_COMPARABLE, ClaimResult, RowResult
from repro.config import Experiment
from repro.config.words import count_noun
from repro.measure.local_system import load_system
from repro.model import counts
from repro.report.verdicts import row_view
from repro.util import files
from repro.util.units import number

HOUR_S = 3600.0
INTRODUCTION = """\
# Artifact appendix

What reviewers of a systems venue ask for: every claim with the command that tests it, the value to expect and its
tolerance, and the cost in GPU-hours on the cluster that it needs. `make artifact` writes this file from the ledger
(`repro/claims/*.toml`) and the suites (`suites/*.toml`); a test compares them.

- **Here** needs no GPU: `make smoke` (two cores, minutes) measures the small twins and simulates every published
  layout; the simulated commands below take about a second or a few for each experiment.
- **On a cluster** `repro submit` runs the measured commands. Cost: from the arithmetic of the steps at the device's
  peak rate to the time limits of the experiments. `repro submit SUITE --profile PROFILE --dry-run` says what is
  predicted in between, once the store has the simulated records.
- **Tolerance** is what is accepted, by kind of evidence; the rule is in `repro/claims/tolerance.py`. Analytic values
  need no run: `repro claims ID` computes them.
"""


@dataclass(frozen=True)
class GpuHours:
    """Range of the GPU-hours of one command."""

    least: float | None
    """Time of the steps' arithmetic at peak rate; None where the peak is unknown."""
    most: float


def write_appendix(output: Path | None, own: Sequence[Path] = ()) -> int:
    """Write the appendix to `output`, or print it, and return 0.

    `own`: additional ledger files. Raises `ConfigError` if a ledger file is invalid.
    """
    if output is None:
        sys.stdout.write(appendix(own))
        return 0
    files.write_file(output, appendix(own))
    return 0


def appendix(own: Sequence[Path] = ()) -> str:
    """Return the appendix as Markdown."""
    ledger, catalogue = load_ledger(own=tuple(own)), SuiteCatalogue()
    results = judge(ledger, [])
    parts = [INTRODUCTION]
    groups = dict.fromkeys(ledger.about[result.claim.file] for result in results)
    parts += [_independent(results), _overview(results, ledger, catalogue)]
    for about in groups:
        parts.append(f"## {about}\n")
        for result in results:
            if ledger.about[result.claim.file] == about:
                parts.append(_claim(result, catalogue))
    return "\n".join(parts)


def gpu_hours(found: EvidenceCommand, catalogue: SuiteCatalogue) -> GpuHours:
    """Return the total GPU-hours of a measured command's experiments."""
    known = catalogue.suites[found.suite]
    chosen = [entry for entry in known.entries if entry.experiment.name in found.names]
    # An experiment that is expected to run out of memory has no steps.
    least = [_arithmetic_hours(entry.experiment) if entry.expect != "oom" else 0.0 for entry in chosen]
    most = sum(e.experiment.limits.timeout_s * e.experiment.layout.world / HOUR_S for e in chosen)
    return GpuHours(None if None in least else sum(hours or 0.0 for hours in least), most)


def _arithmetic_hours(experiment: Experiment) -> float | None:
    """Return the GPU-hours of all steps at the device's peak rate; None where the peak is unknown."""
    layout, training = experiment.layout, experiment.training
    peak = load_system(experiment.system).device.peak_flops.get(layout.precision)
    if peak is None or peak.value is None:
        return None
    work = counts.hardware_flops(experiment.model, experiment.seq, layout.global_batch, layout.recompute)
    return work * training.steps / float(peak.value) / HOUR_S


def _overview(results: list[ClaimResult], ledger: Ledger, catalogue: SuiteCatalogue) -> str:
    """Return a table with one row per suite and system: the total cost for all claims."""
    wanted = [entry for result in results for entry in experiments_of(result.claim.rows)]
    lines = ["| suite | needs | experiments | GPU-hours |", "|---|---|---|---|"]
    for found in catalogue.commands(dict.fromkeys(wanted)):
        if found.kind == "measured":
            lines.append(
                f"| {found.suite} | {found.needs or 'this machine'} | {len(found.names)} | {_hours(found, catalogue)} |"
            )
    return "\n".join(["## What the measured evidence costs\n", *lines, ""])


def _independent(results: list[ClaimResult]) -> str:
    """Return the paragraph with the number of independent quantities among the ledger's values, by kind of evidence."""
    found = count_independent(results, possible=True)
    values = sum(len(result.rows) for result in results)
    kinds = ", ".join(f"{found[kind].tested} {kind}" for kind in KINDS)
    rows = [row.findings for result in results for row in result.rows if row.findings]
    itself = sum(all(finding.itself for finding in findings) for findings in rows)
    tested = sum(found[kind].tested for kind in KINDS)
    return f"""\
{len(results)} claims have {values} values. Several values may repeat one formula or one run: {tested} independent
quantities can be tested ({kinds}; `repro/claims/independence.py` counts them). {itself} values can only be compared
with their own source: their verdict is `consistent` or `inconsistent`, never `reproduced`.
A predicted time that misses is `possible` if the interval from unknown inputs contains the published value.
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
    commands = [
        *catalogue.commands(experiments_of(claim.rows)),
        *evaluation_commands(claim),
        *device_commands(claim),
    ]
    lines += [
        "",
        "```",
        *(f"{c.text}    # {_note(c, catalogue)}" for c in commands),
        f"repro claims {claim.id}",
        "```",
    ]
    if claim.needs:
        lines += ["", f"Needs: {claim.needs}."]
    return "\n".join([*lines, ""])


def _row(row: RowResult, result: ClaimResult) -> str:
    view = row_view(row, result.claim)
    if row.verdict == NOT_COMPARABLE and not row.findings:
        return f"| {_plain(view['label'])} | {_plain(view['published'])} | not comparable: {_plain(row.reason)} |"
    rules: dict[str, list[str]] = {}
    for kind in KINDS:
        for finding in row.findings:
            if finding.kind == kind:
                rules.setdefault(finding.tolerance, []).append(ITSELF if finding.itself else kind)
    rule = "; ".join(f"{', '.join(dict.fromkeys(kinds))}: {rule}" for rule, kinds in rules.items())
    return f"| {_plain(view['label'])} | {_plain(view['published'])} | {_plain(rule) or 'no expression tests it yet'} |"


def _note(found: EvidenceCommand, catalogue: SuiteCatalogue) -> str:
    if not found.suite:
        return found.needs
    if found.kind == "simulated":
        return f"{count_noun(len(found.names), 'simulation')} on this machine"
    return (
        f"{found.needs}, {_hours(found, catalogue)} GPU-hours"
        if found.needs
        else "on processors of this machine"
    )


def _hours(found: EvidenceCommand, catalogue: SuiteCatalogue) -> str:
    if found.suite not in catalogue.suites or not found.needs:
        return "0"
    price = gpu_hours(found, catalogue)
    least = "?" if price.least is None else number(price.least)
    return f"{least} to {number(price.most)}"


def _plain(words: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return words.replace("|", "\\|").replace("\n", " ")
