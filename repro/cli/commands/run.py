"""Commands for runs on this machine: `repro run`, `gpu-day`, `results`, `init` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    Only,
    OptionalNames,
    OptionalPath,
    Rerun,
    Results,
    StoredResults,
    SuiteFiles,
    argument,
    file_option,
    flag,
    folder_option,
    option,
)
from repro.config.errors import require

app = typer.Typer()
FIRST_COMMANDS = {
    "suite": "repro run {file} --dry-run, then repro run {file}",
    "claim": "repro init own.toml, repro run own.toml, then repro claims own-states --ledger {file}",
    "system": "repro systems {file}, then repro simulate --model gpt2-1.5b --system {file} --gpus 32",
    "model": "repro models {file}, then repro simulate --model {file} --system dgx-a100 --gpus 8",
}
"""Commands that `repro init` suggests for a new file, by the kind of the file."""


@app.command(epilog="Example:  repro run suites/smoke.toml --only 'parity-*'")
def run(
    suites: SuiteFiles = None,
    only: Only = None,
    claim: Annotated[
        str, option("Run the experiments of this claim (id or headline number), or of all `headlines`.", "ID")
    ] = "",
    results: Results = Path("results"),
    rerun: Rerun = False,
    evidence: Annotated[
        str, option("Evidence: measured (run on this machine) or simulated (trace of the step without data).")
    ] = "measured",
    system: Annotated[
        str, option("Simulate on this system, not the suite's, and name the records NAME@SYSTEM.", "SYSTEM")
    ] = "",
    dry_run: Annotated[bool, flag("--dry-run", "Only print the experiments and estimated times.")] = False,
    profile: Annotated[
        bool,
        flag("--profile", "Run experiments again; write each rank's trace and memory to DIR/profiles/KEY."),
    ] = False,
    details: Details = False,
    json: Json = False,
) -> int:
    """Run experiments without a record, of suites or of a published claim, and record their results and failures."""
    suites, only = list(suites or []), list(only or [])
    right = "one or more suites without --claim, or no suite with --claim"
    require(bool(suites) != bool(claim), "SUITE", " ".join(map(str, suites)), right)
    if claim:
        says = "cannot be combined with --claim, which selects the experiments"
        require(not only, "--only", " ".join(only), says=says)
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

    how = {"evidence": evidence, "system": system, "profile": profile}
    return print_run(suites, only, results, rerun, json, details, **how)


@app.command("gpu-day", epilog="Example:  repro gpu-day --minutes 9 --out visit")
def gpu_day(
    out: Annotated[OptionalPath, folder_option("New folder for results: at most 8 files of 16 MiB.")] = None,
    minutes: Annotated[float, option("Time limit of all measurement steps together, in minutes.", "N")] = 9.0,
    only: Annotated[
        OptionalNames, option("Run only measurement steps with this name or glob; may be repeated.", "GLOB")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only list the measurement steps and their times.")] = False,
    rehearse: Annotated[bool, flag("--rehearse", "Rehearse with tiny models on processor cores.")] = False,
    inject: Annotated[OptionalNames, option("Let a --rehearse step fail or hang.", "STEP=fail|hang")] = None,
    scratch: Annotated[
        OptionalPath, folder_option("Folder for temporary files, deleted at the end. Default: a new folder.")
    ] = None,
    take: Annotated[
        OptionalPath, option("Import the results in this folder into --results.", "DIR", name="--import")
    ] = None,
    results: Results = Path("results"),
    details: Details = False,
    json: Json = False,
) -> int:
    """Run the measurements that matter most on a GPU machine without internet, within a time limit.

    Exit code 1: a measurement step failed.
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
    what: Annotated[str, argument("Suite or glob of experiments to show. Default: all.", "SUITE|GLOB")] = "",
    results: StoredResults = Path("results"),
    plot: Annotated[OptionalPath, file_option("Draw loss curves to this file, .svg or .png.", "FILE")] = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Show stored results in one table: loss, speed, memory, sent bytes, and speed ratios of compared experiments."""
    from repro.report.text.results import print_results

    return print_results(what, results, json, plot, details)


@app.command(epilog="Example:  repro init mine.toml")
def init(
    words: Annotated[
        OptionalNames, argument("Kind (suite by default, claim, system, model) and path.", "[KIND] FILE")
    ] = None,
) -> int:
    """Write a commented example file: a suite that runs here, a published claim, a system (hardware) or a model."""
    import shlex

    from repro.config.suites import write_template

    *kinds, file = words or ["mine.toml"]
    require(len(kinds) < 2, "FILE", " ".join(words or ()), "FILE, or KIND and FILE")
    kind = kinds[0] if kinds else "suite"
    write_template(Path(file), kind)
    print(f"{file}: a commented {kind}")
    print(f"next: {FIRST_COMMANDS[kind].format(file=shlex.quote(file))}")
    return 0


@app.command(epilog="Example:  repro doctor --profile slurm/mine.toml --nodes 1")
def doctor(
    profile: Annotated[OptionalPath, option("Check the SLURM cluster of this profile.", "FILE.toml")] = None,
    results: Results = Path("results"),
    nodes: Annotated[int, option("With --profile: number of nodes to check in a job.", "N")] = 0,
    kernels: Annotated[
        str, option("Compile CUDA kernels for these architectures without a GPU: sm_70,sm_80 or all.", "ARCH")
    ] = "",
    details: Details = False,
    json: Json = False,
) -> int:
    """Check this machine or a cluster, and show working software and hardware, with the features that they enable."""
    right = "0 without --profile, or 0 or more with --profile"
    require(nodes == 0 or (nodes > 0 and profile is not None), "--nodes", nodes, right)
    if profile is not None:
        from repro.report.text.machine import print_cluster_checks

        return print_cluster_checks(profile, results, nodes, json, details)
    from repro.report.text.machine import print_machine_checks

    return print_machine_checks(results, kernels, json, details)
