"""Commands that show what is published, known and stored: `repro claims`, `models`, `systems`, `report`,
`export`, `artifact`, `compare` and `schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.cli.commands.options import Details, Json, Ledger, Results, StoredResults, file_option
from repro.config.errors import ConfigError

app = typer.Typer()


@app.command(epilog="Example:  repro claims zero-mem-formula-stages")
def claims(
    claim: Annotated[
        str, typer.Argument(help="Show this claim: its id, or the number of a headline claim.", metavar="ID")
    ] = "",
    results: StoredResults = Path("results"),
    ledger: Ledger = None,
    system: Annotated[
        str,
        typer.Option(help="Ask the claims again of this system: predictions, no verdicts.", metavar="SYSTEM"),
    ] = "",
    all_claims: Annotated[bool, typer.Option("--all", help="Show every claim, in one line each.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Show every value with its source, notes and expression.")
    ] = False,
    json: Json = False,
) -> int:
    """Show the headline claims, or one claim: published value, each kind of evidence, verdict."""
    if system:
        from repro.report.text.claims import print_claims_on_system

        if ledger:
            what = "left out with --system: the questions are of our ledger"
            raise ConfigError("--ledger", str(ledger[0]), what)
        return print_claims_on_system(claim, system, json, results, details)
    from repro.report.text.claims import print_claims

    return print_claims(claim, json, results, tuple(ledger or ()), all_claims=all_claims, details=details)


@app.command(epilog="Example:  repro models gpt2-1.5b")
def models(
    name: Annotated[
        str, typer.Argument(help="Show this model, or the one in this file, in full.", metavar="NAME")
    ] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Show models: exact number of parameters, and memory of the model states by ZeRO stage."""
    from repro.report.text.models_and_systems import print_models

    return print_models(name, json, details)


@app.command(epilog="Example:  repro systems dgx2")
def systems(
    name: Annotated[
        str, typer.Argument(help="Show this system, or the one in this file, in full.", metavar="NAME")
    ] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Show systems: devices, memory and links; --details shows the source of each number."""
    from repro.report.text.models_and_systems import print_systems

    return print_systems(name, json, details)


@app.command(epilog="Example:  repro report --results results --out reports/out")
def report(
    results: StoredResults = Path("results"),
    out: Annotated[Path, typer.Option(help="Where the report is written.", metavar="DIR")] = Path(
        "reports/out"
    ),
    ledger: Ledger = None,
    notebooks: Annotated[
        bool,
        typer.Option("--notebooks", help="Also execute the notebooks of reports/ and write them as HTML."),
    ] = False,
    json: Json = False,
) -> int:
    """Write a site of static pages: headline claims, all claims with their evidence, figures, and records."""
    from repro.report.page.build import print_report

    return print_report(results, out, json, notebooks, tuple(ledger or ()))


@app.command(epilog="Example:  repro export --table values --format csv --output values.csv")
def export(
    results: StoredResults = Path("results"),
    ledger: Ledger = None,
    table: Annotated[
        str,
        typer.Option(
            help="headlines, summary (for a pull request), claims, values (every published one), experiments,"
            " comparisons, records (provenance of each), unknowns or reference (results to send)."
        ),
    ] = "claims",
    form: Annotated[str, typer.Option("--format", help="csv, parquet, markdown or latex.")] = "markdown",
    claims: Annotated[
        str,
        typer.Option(help="Only claims whose id matches: of headlines, claims or values.", metavar="GLOB"),
    ] = "",
    columns: Annotated[
        str,
        typer.Option(
            help="Only these columns, separated by commas; by default markdown and latex have six at most,"
            " other formats all.",
            metavar="NAMES",
        ),
    ] = "",
    output: Annotated[
        Optional[Path],  # noqa: UP045
        file_option("Write to this file.", "FILE"),
    ] = None,
) -> int:
    """Write claims or records as a table for other programs, papers and pull requests."""
    from repro.report.export import write_table

    return write_table(results, table, form, output, tuple(ledger or ()), claims, columns)


@app.command(epilog="Example:  repro artifact --output reports/artifact.md")
def artifact(
    output: Annotated[
        Optional[Path],  # noqa: UP045
        file_option("Write to this file.", "FILE"),
    ] = None,
    ledger: Ledger = None,
) -> int:
    """Write the artifact appendix: claim, command, expected value and tolerance, cost in GPU-hours."""
    from repro.report.export import write_appendix

    return write_appendix(output, tuple(ledger or ()))


@app.command(epilog="Example:  repro compare HEAD~1 HEAD --suite mine.toml")
def compare(
    first: Annotated[str, typer.Argument(help="A folder of results, or a commit of --results.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The same, held against A.", metavar="B")],
    results: Results = Path("results"),
    tolerance: Annotated[float, typer.Option(help="A change by less is none.", metavar="PART")] = 0.05,
    suite: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Run this suite in turns in the commits A and B of the checkout that this program is from.",
            metavar="FILE",
        ),
    ] = None,
    launches: Annotated[
        int,
        typer.Option(
            help="With --suite: most runs of each commit, until all speeds are decided.", metavar="N"
        ),
    ] = 30,
    ledger: Ledger = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Compare two sets of results: speed, memory, outcomes, verdicts.  Exit code 1 if something is worse."""
    from repro.report.compare import print_comparison

    return print_comparison(
        first, second, results, tolerance, json, details, tuple(ledger or ()), suite, launches
    )


@app.command(epilog="Example:  repro schedule --pp 4 --micro-batches 8 --chunks 2")
def schedule(
    pp: Annotated[int, typer.Option(help="Pipeline stages, p.", metavar="P")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step, m.", metavar="M")],
    chunks: Annotated[int, typer.Option(help="Model chunks per stage, v.", metavar="V")] = 1,
    name: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="gpipe, 1f1b or interleaved; 1f1b by default, interleaved with chunks.",
            show_default=False,
        ),
    ] = "",
    forward: Annotated[str, typer.Option(help="Relative time of a stage's forward.")] = "1",
    backward: Annotated[str, typer.Option(help="Relative time of a stage's backward.")] = "2",
    details: Details = False,
    json: Json = False,
    svg: Annotated[bool, typer.Option("--svg", help="Draw it as an SVG picture.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        file_option("Write the SVG picture to this file.", "FILE"),
    ] = None,
) -> int:
    """Print or draw a pipeline schedule with its bubble and memory."""
    from repro.report.text.schedule import print_schedule

    return print_schedule(pp, micro_batches, chunks, name, forward, backward, json, svg, out, details)
