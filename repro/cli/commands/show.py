"""Commands that show claims, packaged data and stored results: `repro claims`, `models`, `systems`, `report`,
`export`, `artifact`, `compare` and `schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    Ledger,
    OptionalNames,
    OptionalPath,
    Results,
    StoredResults,
    argument,
    file_option,
    flag,
    option,
)
from repro.config.errors import ConfigError

app = typer.Typer()


@app.command(epilog="Example:  repro claims zero-mem-formula-stages")
def claims(
    claim: Annotated[str, argument("Claim to show: its id, or the number of a headline claim.", "ID")] = "",
    results: StoredResults = Path("results"),
    ledger: Ledger = None,
    system: Annotated[
        str, option("Predict values for this system, without comparison to published ones.", "SYSTEM")
    ] = "",
    all_claims: Annotated[bool, flag("--all", "Show all claims, one line each.")] = False,
    details: Annotated[bool, flag("--details", "Show values with sources, notes and expressions.")] = False,
    json: Json = False,
) -> int:
    """Show the papers' headline claims, or one claim: published, measured and simulated value, and verdict."""
    if system:
        from repro.report.text.claims import print_claims_on_system

        if ledger:
            says = "cannot be combined with --system, which predicts only claims that are packaged with repro"
            raise ConfigError("--ledger", str(ledger[0]), says=says)
        return print_claims_on_system(claim, system, json, results, details)
    from repro.report.text.claims import print_claims

    return print_claims(claim, json, results, tuple(ledger or ()), all_claims=all_claims, details=details)


@app.command(epilog="Example:  repro models gpt2-1.5b")
def models(
    name: Annotated[str, argument("Name or file of a model to show. Default: list all.", "NAME")] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Show models with their exact number of parameters, and their model-state memory by ZeRO stage."""
    from repro.report.text.models_and_systems import print_models

    return print_models(name, json, details)


@app.command(epilog="Example:  repro systems dgx2")
def systems(
    name: Annotated[str, argument("Name or file of a system to show. Default: list all.", "NAME")] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Show systems with their devices, memory and links; --details shows the source of each number."""
    from repro.report.text.models_and_systems import print_systems

    return print_systems(name, json, details)


@app.command(epilog="Example:  repro report --results results --out reports/out")
def report(
    results: StoredResults = Path("results"),
    out: Annotated[Path, option("Folder for the pages of the report.", "DIR")] = Path("reports/out"),
    ledger: Ledger = None,
    notebooks: Annotated[bool, flag("--notebooks", "Also run the notebooks and write them as HTML.")] = False,
    json: Json = False,
) -> int:
    """Write a site of static pages: the papers' claims with measured and simulated values, figures, and records."""
    from repro.report.page.build import print_report

    return print_report(results, out, json, notebooks, tuple(ledger or ()))


@app.command(epilog="Example:  repro export --table values --format csv --output values.csv")
def export(
    results: StoredResults = Path("results"),
    ledger: Ledger = None,
    table: Annotated[
        str,
        option(
            "Table to write: headlines, summary (for a pull request), claims, values (of all claims), experiments,"
            " comparisons, records (their provenance), unknowns, or reference (measurements for use on other machines)."
        ),
    ] = "claims",
    form: Annotated[str, option("Format: csv, parquet, markdown or latex.", name="--format")] = "markdown",
    claims: Annotated[
        OptionalNames,
        option("Write only these claims (in tables headlines, claims, values); may be repeated.", "GLOB"),
    ] = None,
    columns: Annotated[
        str, option("Columns to write: a,b,c. Default: at most six in markdown and latex, else all.", "NAMES")
    ] = "",
    output: Annotated[OptionalPath, file_option("Write the table to this file.", "FILE")] = None,
) -> int:
    """Write the papers' claims or result records as a table for other programs, papers and pull requests."""
    from repro.report.export import write_table

    return write_table(results, table, form, output, tuple(ledger or ()), claims or (), columns)


@app.command(epilog="Example:  repro artifact --output reports/artifact.md")
def artifact(
    output: Annotated[OptionalPath, file_option("Write the appendix to this file.", "FILE")] = None,
    ledger: Ledger = None,
) -> int:
    """Write the artifact appendix: claim, command, expected value and tolerance, cost in GPU-hours."""
    from repro.report.export import write_appendix

    return write_appendix(output, tuple(ledger or ()))


@app.command(epilog="Example:  repro compare HEAD~1 HEAD --suite mine.toml")
def compare(
    first: Annotated[str, argument("First results: a folder, or a commit with records in --results.", "A")],
    second: Annotated[str, argument("Second results: a folder, or a commit with records in --results.", "B")],
    results: Results = Path("results"),
    tolerance: Annotated[float, option("Relative change below which results are equal.", "PART")] = 0.05,
    suite: Annotated[
        OptionalPath, option("First run this suite alternately in the checkout's commits A and B.", "FILE")
    ] = None,
    launches: Annotated[
        int, option("With --suite: maximum runs per commit; fewer if results are precise earlier.", "N")
    ] = 30,
    ledger: Ledger = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Compare speed, memory, outcomes and reproduced claims of two sets of results.  Exit code 1: a result is worse."""
    from repro.report.compare import print_comparison

    return print_comparison(
        first, second, results, tolerance, json, details, tuple(ledger or ()), suite, launches
    )


@app.command(epilog="Example:  repro schedule --pp 4 --micro-batches 8 --chunks 2")
def schedule(
    pp: Annotated[int, option("Number of pipeline stages, p.", "P")],
    micro_batches: Annotated[int, option("Number of micro-batches of a step, m.", "M")],
    chunks: Annotated[int, option("Number of model chunks per stage, v.", "V")] = 1,
    name: Annotated[
        str,
        option(
            "Pipeline schedule: gpipe, 1f1b or interleaved. Default: interleaved if --chunks is above 1, else 1f1b.",
            name="--schedule",
            show_default=False,
        ),
    ] = "",
    forward: Annotated[str, option("Relative time of a forward pass of one pipeline stage.")] = "1",
    backward: Annotated[str, option("Relative time of a backward pass of one pipeline stage.")] = "2",
    details: Details = False,
    json: Json = False,
    svg: Annotated[bool, flag("--svg", "Print the schedule as an SVG picture.")] = False,
    out: Annotated[OptionalPath, file_option("Write the SVG picture to this file.", "FILE")] = None,
) -> int:
    """Print or draw a pipeline schedule with its bubble and memory."""
    from repro.report.text.schedule import print_schedule

    return print_schedule(pp, micro_batches, chunks, name, forward, backward, json, svg, out, details)
