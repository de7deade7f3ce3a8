"""`repro run`, `gpu-day`, `results`, `init` and `doctor`: what is run, came of it, is begun with, could be run here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    Only,
    Rerun,
    Results,
    StoredResults,
    SuiteFiles,
    check_folder,
    file_option,
)
from repro.config.errors import require

app = typer.Typer()
FIRST_COMMANDS = {
    "suite": "repro run {file} --dry-run, then repro run {file}",
    "claim": "repro init own.toml, repro run own.toml, then repro claims own-states --ledger {file}",
    "system": "repro systems {file}, then repro simulate --model gpt2-1.5b --system {file} --gpus 32",
    "model": "repro models {file}, then repro simulate --model {file} --system dgx-a100 --gpus 8",
}
"""Commands that read a file of each kind."""


@app.command(epilog="Example:  repro run suites/smoke.toml --only 'parity-*'")
def run(
    suites: SuiteFiles = None,
    only: Only = None,
    claim: Annotated[
        str,
        typer.Option(
            help="Run the experiments of this claim (an id or a headline's number), or of all `headlines`.",
            metavar="ID",
        ),
    ] = "",
    results: Results = Path("results"),
    rerun: Rerun = False,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, where and how long; start nothing.")
    ] = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Run experiments of suites, or of a claim, that have no record, and record how each ended."""
    suites, only = list(suites or []), list(only or [])
    require(
        bool(suites) != bool(claim), "SUITE", " ".join(map(str, suites)), "one suite or more, or --claim ID"
    )
    if claim:
        require(
            not only,
            "--only",
            " ".join(only),
            says="cannot be combined with --claim, which names experiments",
        )
        from repro.claims.reader import load_ledger
        from repro.claims.run_commands import named_experiments

        only += named_experiments(load_ledger(), claim, evidence)
        suites = [
            Path(name) for name in dict.fromkeys(text.partition("/")[0] for text in only if "/" in text)
        ]
    if dry_run:
        from repro.launch.run import preview_run
        from repro.report.text.results import print_dry_run

        found = preview_run(suites, only, results, rerun, evidence, system)
        return print_dry_run(found, json, details)
    from repro.report.text.results import print_run

    return print_run(suites, only, results, rerun, json, details, evidence=evidence, system=system)


@app.command("gpu-day", epilog="Example:  repro gpu-day --minutes 9 --out visit")
def gpu_day(
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Write the results to this new folder: at most 8 files of 16 MiB.",
            metavar="DIR",
            callback=check_folder,
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Time of the visit; steps that no longer fit are skipped.", metavar="N")
    ] = 9.0,
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Only steps of this name or glob; may be repeated.", metavar="GLOB"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every step with its estimated time; start nothing.")
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run the same steps with tiny sizes on processors.")
    ] = False,
    inject: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="With --rehearse: replace a step by a failure or a hang.", metavar="STEP=fail|hang"
        ),
    ] = None,
    scratch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder for stores and caches, deleted at the end; by default a temporary one.",
            metavar="DIR",
            callback=check_folder,
        ),
    ] = None,
    take: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--import", help="Add the results of this folder to --results.", metavar="DIR"),
    ] = None,
    results: Results = Path("results"),
    details: Details = False,
    json: Json = False,
) -> int:
    """Measure on a GPU machine without internet: steps in order of value, within a given time.

    Exit code 1: a step failed.
    """
    from repro.launch.gpu_day.runner import GpuDayRequest, parse_faults
    from repro.report.text.gpu_day import print_gpu_day, print_import, print_planned_steps

    if take is not None:
        return print_import(take, results, json, details)
    require(dry_run or out is not None, "--out", "", "a folder for the results, or use --dry-run or --import")
    faults = parse_faults(inject or [])
    request = GpuDayRequest(minutes, out or Path("gpu-day"), only or [], rehearse, faults, scratch)
    return print_planned_steps(request, json, details) if dry_run else print_gpu_day(request, json)


@app.command(epilog="Example:  repro results smoke && repro results 'parity-*' --plot losses.svg")
def results(
    what: Annotated[
        str,
        typer.Argument(
            help="A suite, its file, or a glob of experiments; all by default.", metavar="SUITE|GLOB"
        ),
    ] = "",
    results: StoredResults = Path("results"),
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        file_option("Draw the curves of losses to this file, .svg or .png.", "FILE"),
    ] = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Show results side by side: loss, speed, memory, bytes sent, and ratios of interleaved runs."""
    from repro.report.text.results import print_results

    return print_results(what, results, json, plot, details)


@app.command(epilog="Example:  repro init mine.toml")
def init(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            help="suite (the default), claim, system or model; and the file.", metavar="[KIND] FILE"
        ),
    ] = None,
) -> int:
    """Write a commented file to begin with: a suite that runs on this machine, a claim, a system or a model."""
    import shlex

    from repro.config.suites import write_template

    *kinds, file = words or ["mine.toml"]
    require(len(kinds) < 2, "FILE", " ".join(words or ()), "a kind and a file")
    kind = kinds[0] if kinds else "suite"
    write_template(Path(file), kind)
    print(f"{file}: a commented {kind}")
    print(f"next: {FIRST_COMMANDS[kind].format(file=shlex.quote(file))}")
    return 0


@app.command(epilog="Example:  repro doctor --profile slurm/mine.toml --nodes 1")
def doctor(
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Examine a SLURM cluster through this profile instead.", metavar="FILE.toml"),
    ] = None,
    results: Results = Path("results"),
    nodes: Annotated[int, typer.Option(help="With --profile: number of nodes to check.", metavar="N")] = 0,
    kernels: Annotated[
        str,
        typer.Option(
            help="Compile and list every CUDA kernel for these architectures, GPU or not: sm_70,sm_80 or all.",
            metavar="ARCH",
        ),
    ] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Show what works on this machine, or on a cluster, and what it enables."""
    right = "0 or more, with --profile: the nodes of its cluster"
    require(nodes == 0 or (nodes > 0 and profile is not None), "--nodes", nodes, right)
    if profile is not None:
        from repro.report.text.machine import print_cluster_checks

        return print_cluster_checks(profile, results, nodes, json, details)
    from repro.report.text.machine import print_machine_checks

    return print_machine_checks(results, kernels, json, details)
