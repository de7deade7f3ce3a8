"""Suites on a SLURM cluster (submit, status, logs, cancel, collect), and emulated networks by hand (`repro lab`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    Only,
    ProfileFile,
    Rerun,
    Results,
    SuiteFile,
    check_folder,
)

app = typer.Typer()


@app.command(epilog="Example:  repro submit suites/zero_r.toml --profile slurm/dgx2.toml --dry-run")
def submit(
    suite: SuiteFile,
    profile: ProfileFile,
    only: Only = None,
    results: Results = Path("results"),
    exclude: Annotated[
        str, typer.Option(help="Keep away from these nodes: n3,n[7-8].", metavar="NODES")
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the planned job arrays and their GPU-hours; --details prints cases and scripts.",
        ),
    ] = False,
    move: Annotated[
        bool, typer.Option("--move", help="Run cases of other systems on the profile's, named NAME@SYSTEM.")
    ] = False,
    rerun: Rerun = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Submit experiments of a suite that have no record and no job to SLURM: a job array for each shape."""
    from repro.launch.slurm.submission.submit import submit_suite

    return submit_suite(suite, profile, results, only or [], exclude, dry_run, move, rerun, json, details)


@app.command(epilog="Example:  repro status --watch")
def status(
    results: Results = Path("results"),
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until no case is open.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every submission of a case, not the last alone.")
    ] = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Show the state of every submitted case.  Exit code 3: something is open; 1: something failed."""
    from repro.report.text.cluster import print_status

    return print_status(results, watch, every, json, details)


@app.command(epilog="Example:  repro logs fig8-c4-60b --rank 17")
def logs(
    case: Annotated[str, typer.Argument(help="A submitted case.", metavar="CASE")],
    results: Results = Path("results"),
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="What this rank wrote; without it, the job around the ranks.", metavar="R"),
    ] = None,
) -> int:
    """Show the last output of a case or of one of its ranks."""
    from repro.launch.slurm.commands import print_logs

    return print_logs(results, case, rank)


@app.command(epilog="Example:  repro cancel 'fig6-*'")
def cancel(
    what: Annotated[
        str,
        typer.Argument(
            help="A suite, a submission, a case or a glob of cases; all by default.", metavar="WHAT"
        ),
    ] = "",
    results: Results = Path("results"),
) -> int:
    """Cancel jobs that wait or run."""
    from repro.launch.slurm.commands import cancel_jobs

    return cancel_jobs(results, what)


@app.command(epilog="Example:  repro collect --into results")
def collect(
    results: Results = Path("results"),
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Also copy records to this folder, those that it lacks.",
            metavar="DIR",
            callback=check_folder,
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Record cases that were lost or cancelled, and check every record."""
    from repro.launch.slurm.commands import collect_records

    return collect_records(results, into, json)


lab = typer.Typer(
    help="Emulated networks: ranks of this machine behind links of any rate.",
    epilog="Example:  repro lab check  &&  repro lab up --nodes 2 --between 8e6",
    no_args_is_help=True,
)


@lab.command("check", epilog="Example:  repro lab check")
def check_requirements() -> int:
    """Say whether emulated networks can be had here, and if not, what is missing.  Exit code 1: they cannot."""
    from repro.report.text.cluster import check_lab

    return check_lab()


@lab.command("up", epilog="Example:  repro lab up --nodes 2 --ranks-per-node 2 --between 8e6")
def start_network(
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


@lab.command("status", epilog="Example:  repro lab status")
def network_status(json: Json = False) -> int:
    """Show the running network and its measured rates.  Exit code 3: no network runs."""
    from repro.report.text.cluster import print_lab_status

    return print_lab_status(json)


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="Example:  repro lab exec 0 cat /proc/net/dev",
)
def execute_on_network(
    rank: Annotated[int, typer.Argument(help="Whose network the command has.", metavar="RANK")],
    command: Annotated[list[str], typer.Argument(help="What is run.", metavar="COMMAND...")],
) -> int:
    """Run a command where a rank of the network is."""
    from repro.report.text.cluster import execute_on_rank

    return execute_on_rank(rank, command)


@lab.command("down", epilog="Example:  repro lab down")
def stop_network() -> int:
    """Take the network down.  Exit code 3: none was up."""
    from repro.report.text.cluster import stop_lab

    return stop_lab()
