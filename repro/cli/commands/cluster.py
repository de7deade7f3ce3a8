"""Suites on a SLURM cluster (submit, status, logs, cancel, collect), and emulated networks by hand (`repro lab`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    Only,
    OptionalInt,
    OptionalPath,
    ProfileFile,
    Rerun,
    Results,
    SuiteFile,
    argument,
    flag,
    folder_option,
    option,
)

app = typer.Typer()


@app.command(epilog="Example:  repro submit suites/zero_r.toml --profile slurm/dgx2.toml --dry-run")
def submit(
    suite: SuiteFile,
    profile: ProfileFile,
    only: Only = None,
    results: Results = Path("results"),
    exclude: Annotated[str, option("Keep away from these nodes: n3,n[7-8].", "NODES")] = "",
    dry_run: Annotated[
        bool,
        flag(
            "--dry-run",
            "Print the planned job arrays and their GPU-hours; --details prints cases and scripts.",
        ),
    ] = False,
    move: Annotated[
        bool, flag("--move", "Run cases of other systems on the profile's, named NAME@SYSTEM.")
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
    watch: Annotated[bool, flag("--watch", "Refresh until no case is open.")] = False,
    every: Annotated[bool, flag("--all", "Every submission of a case, not the last alone.")] = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Show the state of every submitted case.  Exit code 3: something is open; 1: something failed."""
    from repro.report.text.cluster import print_status

    return print_status(results, watch, every, json, details)


@app.command(epilog="Example:  repro logs fig8-c4-60b --rank 17")
def logs(
    case: Annotated[str, argument("A submitted case.", "CASE")],
    results: Results = Path("results"),
    rank: Annotated[
        OptionalInt, option("What this rank wrote; without it, the job around the ranks.", "R")
    ] = None,
) -> int:
    """Show the last output of a case or of one of its ranks."""
    from repro.launch.slurm.commands import print_logs

    return print_logs(results, case, rank)


@app.command(epilog="Example:  repro cancel 'fig6-*'")
def cancel(
    what: Annotated[
        str, argument("A suite, a submission, a case or a glob of cases; all by default.", "WHAT")
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
        OptionalPath, folder_option("Also copy records to this folder, those that it lacks.")
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
    suite: Annotated[OptionalPath, argument("A suite file.", "[SUITE.toml")] = None,
    experiment: Annotated[str, argument("Its experiment whose network is made.", "NAME]")] = "",
    nodes: Annotated[int, option("Without a suite: nodes.", "N")] = 2,
    ranks_per_node: Annotated[int, option("Ranks of each node.", "N")] = 1,
    between: Annotated[float, option("Bytes/s of a node's link.", "RATE")] = 0.0,
    within: Annotated[float, option("Bytes/s of a rank's own link; 0: no limit.", "RATE")] = 0.0,
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
    rank: Annotated[int, argument("Whose network the command has.", "RANK")],
    command: Annotated[list[str], argument("What is run.", "COMMAND...")],
) -> int:
    """Run a command where a rank of the network is."""
    from repro.report.text.cluster import execute_on_rank

    return execute_on_rank(rank, command)


@lab.command("down", epilog="Example:  repro lab down")
def stop_network() -> int:
    """Take the network down.  Exit code 3: none was up."""
    from repro.report.text.cluster import stop_lab

    return stop_lab()
