"""``repro run`` and ``repro doctor``: what is run, and what could be run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.cli.options import Json, Results

app = typer.Typer()


@app.command(epilog="Example:  repro run suites/smoke.toml --only 'parity-*'")
def run(
    suite: Annotated[Path, typer.Argument(help="A suite file.", metavar="SUITE.toml")],
    only: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates this on Python 3.10 as well
        typer.Option(
            "--only", help="Only experiments of this name or glob; may be repeated.", metavar="GLOB"
        ),
    ] = None,
    results: Results = Path("results"),
    launcher: Annotated[str, typer.Option(help="Who starts the ranks: local.")] = "local",
    rerun: Annotated[bool, typer.Option("--rerun", help="Run again what the store already holds.")] = False,
    evidence: Annotated[
        str,
        typer.Option(help="measured: run it here; simulated: trace its step in shape only, at any scale."),
    ] = "measured",
    system: Annotated[
        str,
        typer.Option(
            help="Simulate on this system instead of the suite's; named NAME@SYSTEM then.", metavar="SYSTEM"
        ),
    ] = "",
    json: Json = False,
) -> int:
    """Run what the store lacks of a suite and record how each experiment ended."""
    from repro.launch.run import command

    return command(suite, only or [], results, launcher, rerun, json, evidence, system)


@app.command(epilog="Example:  repro doctor --json")
def doctor(json: Json = False) -> int:
    """Show what works on this machine and what it enables."""
    from repro.measure.doctor import command

    return command(json)
