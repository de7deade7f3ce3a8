"""Commands that predict, and what predictions rest on: `repro simulate`, `fit`, `plan`, `calibrate` and
`validate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from repro.cli.commands.options import (
    Details,
    Json,
    LaunchFolder,
    LaunchFramework,
    LaunchSource,
    Ledger,
    ModelName,
    OptionalInt,
    OptionalPath,
    OptionalPaths,
    OptionalRange,
    Results,
    StoredResults,
    argument,
    count_option,
    file_option,
    flag,
    layout_option,
    option,
    question_options,
    read_alternative,
)
from repro.config.errors import require
from repro.simulate.plan.candidates import DEFAULT_PLAN_ROWS, DEFAULT_RANK, RANK_QUANTILES, LayoutQuery

app = typer.Typer()


@app.command(
    epilog="Example:  repro simulate --model turing-nlg-17b --system dgx2 --gpus 256 --tp 4 --zero 1"
)
@question_options
def simulate(
    context: typer.Context,
    asked: LayoutQuery,
    model: ModelName = "",
    timeline: Annotated[
        OptionalPath, file_option("Write when everything happens, for ui.perfetto.dev.", "FILE.json")
    ] = None,
    snapshot: Annotated[
        OptionalPath, file_option("Write every allocation, for pytorch.org/memory_viz.", "FILE.pickle")
    ] = None,
    versus: Annotated[
        str, option("Compare with the layout after these changes: '--tp 4 --zero 1'.", "OPTIONS")
    ] = "",
    source: LaunchSource = None,
    launch: LaunchFramework = "",
    output: LaunchFolder = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Predict one training step from a trace of tensor shapes: whether it fits, its time, memory and traffic.

    Exit code 1: the step does not fit.
    """
    from repro.engines.frameworks.files import LaunchFiles
    from repro.report.text.predictions import print_simulation, print_versus

    if versus:
        others = {"--timeline": timeline, "--snapshot": snapshot, "--from": source, "--launch": launch}
        for name, value in others.items():
            require(
                not value,
                "--versus",
                versus,
                says=f"cannot be combined with {name}, which is about one layout",
            )
        return print_versus((model, asked), read_alternative(context, "--versus", versus), json)

    files = LaunchFiles(source, launch, output)
    return print_simulation(model, asked, timeline, snapshot, json, details, files)


@app.command(epilog="Example:  repro fit --system dgx2 --gpus 64 --micro-batch 8 --recompute")
@question_options
def fit(
    asked: LayoutQuery,
    model: Annotated[str, option("Take sizes from this model.", "M", name="--model")] = "",
    hidden: Annotated[int, count_option("Width.  Without: one that about hidden/64 layers fill.")] = 0,
    heads: Annotated[int, count_option("Attention heads; hidden/128 by default.")] = 0,
    vocab: Annotated[int, count_option("Vocabulary; 51200 by default.")] = 0,
    search: Annotated[str, option("layers, or micro-batch (of --model).")] = "layers",
    measure: Annotated[bool, flag("--measure", "Try on the devices of this machine.")] = False,
    as_rank: Annotated[
        OptionalInt, option("With --measure: be this rank alone, of --of; collectives are left out.", "R")
    ] = None,
    of: Annotated[int, count_option("The ranks of which --as-rank is one.")] = 0,
    results: Results = Path("results"),
    details: Details = False,
    json: Json = False,
) -> int:
    """Find the largest model that fits in device memory, for each ZeRO stage, and the term that limits it.

    With --zero or --json, one stage is searched.  Exit code 1: nothing fits, or a trial of --measure failed.
    """
    sizes = {"hidden": hidden, "heads": heads, "vocab": vocab}
    for name, value in (("--as-rank", as_rank), ("--of", of or None)):
        require(measure or value is None, name, value, says="needs --measure, which tries what a rank holds")
    if measure:
        from repro.report.text.predictions import print_measured_fit

        return print_measured_fit(asked, model, sizes, search, as_rank, of, results, json, details)
    from repro.report.text.predictions import print_fit

    return print_fit(asked, model, sizes, search, json, details)


@app.command(epilog="Example:  repro plan --model turing-nlg-17b --system dgx2 --gpus 256 --global-batch 512")
@question_options
def plan(
    asked: LayoutQuery,
    model: ModelName = "",
    dp: Annotated[
        OptionalInt, layout_option("Replicas: only layouts whose tp x pp leaves so many.", "N", name="--dp")
    ] = None,
    top: Annotated[
        OptionalInt, option(f"Print the best N; without: {DEFAULT_PLAN_ROWS}, and all with --json.", "N")
    ] = None,
    rank_by: Annotated[
        str, option(f"Order layouts by this step time, or by cost: {', '.join(RANK_QUANTILES)}.", "NAME")
    ] = DEFAULT_RANK,
    as_map: Annotated[
        bool, flag("--map", "Draw tp against pp of one strategy; --memory-limit may be several: 40GB,80GB.")
    ] = False,
    tokens: Annotated[
        float, option("Tokens of a training, for its time, energy and cost.", "N", show_default=False)
    ] = 0.0,
    price_per_gpu_hour: Annotated[
        str,
        option("US dollars for a GPU hour, one for each system; without: the systems' prices.", "PRICE,..."),
    ] = "",
    source: LaunchSource = None,
    launch: LaunchFramework = "",
    output: LaunchFolder = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Find the fastest layouts of a model on a system: best first, with step time and memory.

    --system may be several, with commas, whose layouts are ranked together.  Each option of a layout fixes a key of
    the search.  Exit code 1: no layout fits.
    """
    from repro.engines.frameworks.files import LaunchFiles
    from repro.report.text.predictions import print_plan

    fixed = asked if dp is None else replace(asked, layout={**asked.layout, "dp": dp})
    files = LaunchFiles(source, launch, output)
    return print_plan(model, fixed, json, as_map, tokens, price_per_gpu_hour, top, rank_by, details, files)


@app.command(epilog="Example:  repro twin ds-3p75x-lowbw --machine here.toml")
def twin(
    originals: Annotated[list[str], argument("A claim, or experiments.", "CLAIM | SUITE/EXPERIMENT...")],
    machine: Annotated[
        OptionalPath, option("This machine, by repro calibrate with as many ranks.", "FILE.toml")
    ] = None,
    ranks: Annotated[int, option("Processes of the twin.")] = 16,
    part: Annotated[int, option("The model is as wide as 1/PART of the original.")] = 8,
    width: Annotated[int, count_option("Of the twin's model, in place of --part.")] = 0,
    layers: Annotated[int, option("Of the twin's model.")] = 4,
    tp: Annotated[int, count_option("Tensor-parallel degree; as the ranks allow.")] = 0,
    steps: Annotated[int, option("Of each experiment; the first is not timed.")] = 10,
    within: Annotated[
        str, option("What rings reach inside a node of the original; several: a sweep.", "RATE,...")
    ] = "",
    between: Annotated[str, option("What rings reach between its nodes; several: a sweep.", "RATE,...")] = "",
    write: Annotated[OptionalPath, file_option("Write it as a suite.", "SUITE.toml")] = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Derive a small twin of compared experiments, on an emulated network that keeps what their ratio depends on."""
    from repro.accuracy.twins.derive import TwinOptions
    from repro.report.text.twin import print_twin

    choice = TwinOptions(ranks=ranks, part=part, width=width, layers=layers, tp=tp, steps=steps)
    return print_twin(originals, machine, choice, within, between, write, json, details)


@app.command(epilog="Example:  repro calibrate --system local --gpus 2 --output here.toml")
def calibrate(
    system: Annotated[
        str,
        option(
            "local: processor cores and gloo; local-gpu: GPUs and NCCL; with --profile, its system.", "NAME"
        ),
    ],
    gpus: Annotated[
        int, count_option("Ranks of a node; by default every GPU, or 2 on processor cores.", "N")
    ] = 0,
    output: Annotated[
        OptionalPath, file_option("The system file; by default NAME-calibrated.toml here.", "FILE.toml")
    ] = None,
    profile: Annotated[
        OptionalPath, option("Measure nodes of this SLURM, in one job that is waited for.", "FILE.toml")
    ] = None,
    nodes: Annotated[int, count_option("How many, with --profile; by default 1.", "N")] = 0,
    quick: Annotated[bool, flag("--quick", "Few sizes and repeats: to try it out.")] = False,
    suite: Annotated[
        OptionalPaths,
        option(
            "Operators of this suite's own steps, for twins on emulated networks; may be given again.",
            "SUITE.toml",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Measure this machine (operators, copies, launches, collectives by size and group) and write a system file.

    It takes some minutes, in which nothing else should run.  A file speaks for the number of ranks that it was
    measured with, on this machine or, with --profile, on nodes of a cluster.
    """
    from repro.accuracy.calibrate.calibration import run_calibration
    from repro.report.text.machine import print_calibration

    found = run_calibration(system, gpus, output, profile, nodes, quick, suite or [], quiet=json)
    return print_calibration(found, json)


@app.command(epilog="Example:  repro validate --svg validation.svg")
def validate(
    results: StoredResults = Path("results"),
    svg: Annotated[
        OptionalPath, file_option("Draw published against predicted to this file.", "FILE")
    ] = None,
    system: Annotated[
        str,
        option(
            "Also predict what was measured here, on this file of `repro calibrate`.",
            "FILE.toml",
            show_default=False,
        ),
    ] = "",
    unknowns: Annotated[
        bool,
        flag(
            "--unknowns",
            "Instead: the unknown numbers of systems that would settle most rows, and what measures them.",
        ),
    ] = False,
    covered: Annotated[
        OptionalRange,
        option(
            "Instead: whether so many percent of published rates, and of ratios, lie in their 90 % intervals "
            "with the model's error elsewhere.",
            "LEAST MOST",
            show_default=False,
        ),
    ] = None,
    ledger: Ledger = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Compare published throughput with what is predicted, by family; and predicted steps with measured ones."""
    if covered is not None:
        from repro.report.text.validate import print_coverage

        alone = svg is None and not system and not unknowns and not json
        said = f"{covered[0]:g} {covered[1]:g}"
        require(alone, "--covered", said, says="goes without --svg, --system, --unknowns and --json")
        require(0 <= covered[0] <= covered[1] <= 100, "--covered", said, "two percentages, the least first")
        return print_coverage(results, covered, tuple(ledger or ()))
    if unknowns:
        from repro.report.text.validate import print_unknowns

        require(svg is None and not system, "--unknowns", True, says="goes without --svg and --system")
        return print_unknowns(results, json, details, tuple(ledger or ()))
    from repro.report.text.validate import print_validation

    return print_validation(results, json, details, svg, system, tuple(ledger or ()))
