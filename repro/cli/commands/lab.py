"""Emulated networks by hand: check, up, status, exec, down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.cli.commands.options import Json

app = typer.Typer(
    help="Emulated networks: ranks of this machine behind links of any rate.",
    epilog="Example:  repro lab check  &&  repro lab up --nodes 2 --between 8e6",
    no_args_is_help=True,
)


@app.command(epilog="Example:  repro lab check")
def check() -> int:
    """Say whether emulated networks can be had here, and if not, what is missing.  Exit code 1: they cannot."""
    from repro.report.text.cluster import check_lab

    return check_lab()


@app.command(epilog="Example:  repro lab up --nodes 2 --ranks-per-node 2 --between 8e6")
def up(
    suite: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates this on Python 3.10 as well
        typer.Argument(help="A suite file.", metavar="[SUITE.toml"),
    ] = None,
    experiment: Annotated[
        str, typer.Argument(help="Its experiment whose network is made.", metavar="NAME]")
    ] = "",
    nodes: Annotated[int, typer.Option(help="Without a suite: nodes.", metavar="N")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of each node.", metavar="N")] = 1,
    between: Annotated[float, typer.Option(help="Bytes/s of a node's link.", metavar="RATE")] = 0.0,
    within: Annotated[
        float, typer.Option(help="Bytes/s of a rank's own link; 0: no limit.", metavar="RATE")
    ] = 0.0,
) -> int:
    """Make a network that stays, with every link measured."""
    from repro.report.text.cluster import start_lab

    asked = {"nodes": nodes, "ranks_per_node": ranks_per_node, "between": between, "within": within}
    return start_lab(suite, experiment, asked)


@app.command(epilog="Example:  repro lab status")
def status(json: Json = False) -> int:
    """Show the running network and its measured rates.  Exit code 3: no network runs."""
    from repro.report.text.cluster import print_lab_status

    return print_lab_status(json)


@app.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="Example:  repro lab exec 0 cat /proc/net/dev",
)
def execute(
    rank: Annotated[int, typer.Argument(help="Whose network the command has.", metavar="RANK")],
    command: Annotated[list[str], typer.Argument(help="What is run.", metavar="COMMAND...")],
) -> int:
    """Run a command where a rank of the network is."""
    from repro.report.text.cluster import execute_on_rank

    return execute_on_rank(rank, command)


@app.command(epilog="Example:  repro lab down")
def down() -> int:
    """Take the network down.  Exit code 3: none was up."""
    from repro.report.text.cluster import stop_lab

    return stop_lab()
