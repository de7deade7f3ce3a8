"""Commands for suites on a SLURM cluster (`repro submit`, `status`, `logs`, `cancel`, `collect`), and `repro lab`."""

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
    exclude: Annotated[str, option("Nodes on which no job may run: n3,n[7-8].", "NODES")] = "",
    dry_run: Annotated[bool, flag("--dry-run", "Only print the planned job arrays and GPU-hours.")] = False,
    move: Annotated[
        bool, flag("--move", "Run experiments for other systems on the profile's system, as NAME@SYSTEM.")
    ] = False,
    rerun: Rerun = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Submit experiments of a suite to SLURM that have no record and no job, in one job array for each job size."""
    from repro.launch.slurm.submission.submit import submit_suite

    return submit_suite(suite, profile, results, only or [], exclude, dry_run, move, rerun, json, details)


@app.command(epilog="Example:  repro status --watch")
def status(
    results: Results = Path("results"),
    watch: Annotated[bool, flag("--watch", "Refresh the output until no experiment waits or runs.")] = False,
    every: Annotated[bool, flag("--all", "Show every submission of a suite, not only the newest.")] = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Show the state of every submitted experiment.  Exit code 3: some experiments wait or run; 1: some failed."""
    from repro.report.text.cluster import print_status

    return print_status(results, watch, every, json, details)


@app.command(epilog="Example:  repro logs fig8-c4-60b --rank 17")
def logs(
    case: Annotated[str, argument("Name of a submitted experiment.", "CASE")],
    results: Results = Path("results"),
    rank: Annotated[OptionalInt, option("Rank whose output is shown. Default: the job script.", "R")] = None,
) -> int:
    """Show the last lines that the job of a submitted experiment, or one of its ranks, printed."""
    from repro.launch.slurm.commands import print_logs

    return print_logs(results, case, rank)


@app.command(epilog="Example:  repro cancel 'fig6-*'")
def cancel(
    what: Annotated[
        str, argument("Suite, submission, experiment or glob of experiments to cancel. Default: all.", "WHAT")
    ] = "",
    results: Results = Path("results"),
) -> int:
    """Cancel submitted SLURM jobs that wait or run."""
    from repro.launch.slurm.commands import cancel_jobs

    return cancel_jobs(results, what)


@app.command(epilog="Example:  repro collect --into results")
def collect(
    results: Results = Path("results"),
    into: Annotated[OptionalPath, folder_option("Folder to which all records are also copied.")] = None,
    json: Json = False,
) -> int:
    """Record each submitted experiment that was lost or cancelled, and print a summary of all submitted experiments."""
    from repro.launch.slurm.commands import collect_records

    return collect_records(results, into, json)


lab = typer.Typer(
    help="Emulated networks: ranks on this machine behind links with a limited rate.",
    epilog="Example:  repro lab check  &&  repro lab up --nodes 2 --between 8e6",
    no_args_is_help=True,
)


@lab.command("check", epilog="Example:  repro lab check")
def check_requirements() -> int:
    """Show whether emulated networks work on this machine.  Exit code 1: the named requirement is missing."""
    from repro.report.text.cluster import check_lab

    return check_lab()


@lab.command("up", epilog="Example:  repro lab up --nodes 2 --ranks-per-node 2 --between 8e6")
def start_network(
    suite: Annotated[OptionalPath, argument("A suite file.", "[SUITE.toml")] = None,
    experiment: Annotated[str, argument("Experiment of the suite whose network is emulated.", "NAME]")] = "",
    nodes: Annotated[int, option("Number of emulated nodes, if no suite is given.", "N")] = 2,
    ranks_per_node: Annotated[int, option("Number of ranks per emulated node.", "N")] = 1,
    between: Annotated[float, option("Bytes/s of a node's link; required with several nodes.", "RATE")] = 0.0,
    within: Annotated[float, option("Bytes/s of each rank's link inside a node; 0: no limit.", "RATE")] = 0.0,
) -> int:
    """Start an emulated network that runs until `repro lab down`, and measure all its links."""
    from repro.report.text.cluster import start_lab

    sizes = {"nodes": nodes, "ranks_per_node": ranks_per_node, "between": between, "within": within}
    return start_lab(suite, experiment, sizes)


@lab.command("status", epilog="Example:  repro lab status")
def network_status(json: Json = False) -> int:
    """Show the running emulated network and the measured rates of its links.  Exit code 3: no network runs."""
    from repro.report.text.cluster import print_lab_status

    return print_lab_status(json)


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="Example:  repro lab exec 0 cat /proc/net/dev",
)
def execute_on_network(
    rank: Annotated[int, argument("Rank in whose network namespace the command runs.", "RANK")],
    command: Annotated[list[str], argument("Command to run, with its arguments.", "COMMAND...")],
) -> int:
    """Run a command in the network namespace of a rank of the running emulated network."""
    from repro.report.text.cluster import execute_on_rank

    return execute_on_rank(rank, command)


@lab.command("down", epilog="Example:  repro lab down")
def stop_network() -> int:
    """Stop the running emulated network.  Exit code 3: no network runs."""
    from repro.report.text.cluster import stop_lab

    return stop_lab()
