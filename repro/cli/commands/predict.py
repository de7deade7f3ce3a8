"""Commands for predictions and their accuracy: `repro simulate`, `fit`, `plan`, `twin`, `calibrate`, `validate`."""

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
    query: LayoutQuery,
    model: ModelName = "",
    timeline: Annotated[
        OptionalPath, file_option("Write the simulated step's timeline for ui.perfetto.dev.", "FILE.json")
    ] = None,
    snapshot: Annotated[
        OptionalPath, file_option("Write simulated allocations for pytorch.org/memory_viz.", "FILE.pickle")
    ] = None,
    versus: Annotated[
        str, option("Compare the step with a step under other options, such as '--tp 4 --zero 1'.", "OPTIONS")
    ] = "",
    source: LaunchSource = None,
    launch: LaunchFramework = "",
    output: LaunchFolder = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Predict one training step from a trace of tensor shapes: whether it fits in memory, its time, memory and traffic.

    Exit code 1: the step does not fit in memory.
    """
    from repro.engines.frameworks.files import LaunchFiles
    from repro.report.text.predictions import print_simulation, print_versus

    if versus:
        others = {"--timeline": timeline, "--snapshot": snapshot, "--from": source, "--launch": launch}
        for name, value in others.items():
            says = f"cannot be combined with {name}, since --versus compares two layouts"
            require(not value, "--versus", versus, says=says)
        return print_versus((model, query), read_alternative(context, "--versus", versus), json)

    files = LaunchFiles(source, launch, output)
    return print_simulation(model, query, timeline, snapshot, json, details, files)


@app.command(epilog="Example:  repro fit --system dgx2 --gpus 64 --micro-batch 8 --recompute")
@question_options
def fit(
    query: LayoutQuery,
    model: Annotated[str, option("Take the layer sizes from this model.", "M", name="--model")] = "",
    hidden: Annotated[int, count_option("Hidden size. Default: about 64 times the number of layers.")] = 0,
    heads: Annotated[int, count_option("Number of attention heads. Default: hidden size / 128.")] = 0,
    vocab: Annotated[int, count_option("Vocabulary size. Default: 51200.")] = 0,
    search: Annotated[str, option("Quantity to maximize: layers, or micro-batch (with --model).")] = "layers",
    measure: Annotated[bool, flag("--measure", "Run each search trial on this machine's devices.")] = False,
    as_rank: Annotated[
        OptionalInt, option("With --measure: run only rank R of --of ranks, without collectives.", "R")
    ] = None,
    of: Annotated[int, count_option("With --as-rank: number of ranks of the layout.")] = 0,
    results: Results = Path("results"),
    details: Details = False,
    json: Json = False,
) -> int:
    """Find the largest model that fits in device memory, for each ZeRO stage, and the memory term that limits it.

    With --zero or --json, the search covers one ZeRO stage.  Exit code 1: no model fits, or a trial failed.
    """
    sizes = {"hidden": hidden, "heads": heads, "vocab": vocab}
    for name, value in (("--as-rank", as_rank), ("--of", of or None)):
        require(measure or value is None, name, value, says="cannot be used without --measure")
    if measure:
        from repro.report.text.predictions import print_measured_fit

        return print_measured_fit(query, model, sizes, search, as_rank, of, results, json, details)
    from repro.report.text.predictions import print_fit

    return print_fit(query, model, sizes, search, json, details)


@app.command(epilog="Example:  repro plan --model turing-nlg-17b --system dgx2 --gpus 256 --global-batch 512")
@question_options
def plan(
    query: LayoutQuery,
    model: ModelName = "",
    dp: Annotated[
        OptionalInt, layout_option("Data-parallel degree: gpus / (tp x cp x pp).", "N", name="--dp")
    ] = None,
    top: Annotated[
        OptionalInt, option(f"Print the best N layouts. Default: {DEFAULT_PLAN_ROWS}; all with --json.", "N")
    ] = None,
    rank_by: Annotated[
        str,
        option(
            f"Order the layouts by this quantile of the step time, or by cost: {', '.join(RANK_QUANTILES)}.",
            "NAME",
        ),
    ] = DEFAULT_RANK,
    as_map: Annotated[
        bool, flag("--map", "Print which pairs of tp and pp fit; --memory-limit may list sizes: 40GB,80GB.")
    ] = False,
    tokens: Annotated[
        float, option("Predict duration, energy and cost of a training on N tokens.", "N", show_default=False)
    ] = 0.0,
    price_per_gpu_hour: Annotated[
        str, option("GPU-hour prices in US dollars, one per system. Default: from system files.", "PRICE,...")
    ] = "",
    source: LaunchSource = None,
    launch: LaunchFramework = "",
    output: LaunchFolder = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Find the fastest layouts of a model on a system, with their step time and memory.

    --system may name several systems, separated by commas, whose layouts are ranked together.  Each option of a
    layout restricts the search to its value.  Exit code 1: no layout fits.
    """
    from repro.engines.frameworks.files import LaunchFiles
    from repro.report.text.predictions import print_plan

    fixed = query if dp is None else replace(query, layout={**query.layout, "dp": dp})
    files = LaunchFiles(source, launch, output)
    return print_plan(model, fixed, json, as_map, tokens, price_per_gpu_hour, top, rank_by, details, files)


@app.command(epilog="Example:  repro twin ds-3p75x-lowbw --machine here.toml")
def twin(
    originals: Annotated[list[str], argument("Claim id or experiment names.", "CLAIM | SUITE/EXPERIMENT...")],
    machine: Annotated[
        OptionalPath, option("System file of this machine, from repro calibrate --gpus RANKS.", "FILE.toml")
    ] = None,
    ranks: Annotated[int, option("Number of ranks of the twin, the small-scale experiment.")] = 16,
    part: Annotated[int, option("Approximate ratio of hidden sizes, published model over twin.")] = 8,
    width: Annotated[int, count_option("Hidden size of the twin's model, instead of the ratio --part.")] = 0,
    layers: Annotated[int, option("Minimum number of layers of the twin's model.")] = 4,
    tp: Annotated[int, count_option("Twin's tensor-parallel degree. Default: the largest possible.")] = 0,
    steps: Annotated[int, option("Training steps of each experiment; the first step is not timed.")] = 10,
    within: Annotated[str, option("Bytes/s per device in nodes of the published system.", "RATE,...")] = "",
    between: Annotated[str, option("Bytes/s of a node to others in the published system.", "RATE,...")] = "",
    write: Annotated[OptionalPath, file_option("Write the twins to this suite file.", "SUITE.toml")] = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Derive scaled-down experiments (twins) and an emulated network that preserve the originals' speed ratio."""
    from repro.accuracy.twins.derive import TwinOptions
    from repro.report.text.twin import print_twin

    choice = TwinOptions(ranks=ranks, part=part, width=width, layers=layers, tp=tp, steps=steps)
    return print_twin(originals, machine, choice, within, between, write, json, details)


@app.command(epilog="Example:  repro calibrate --system local --gpus 2 --output here.toml")
def calibrate(
    system: Annotated[
        str, option("local (CPU cores, gloo), local-gpu (GPUs, NCCL) or the system of --profile.", "NAME")
    ],
    gpus: Annotated[int, count_option("Ranks per node. Default: all GPUs, or 2 on CPU cores.", "N")] = 0,
    output: Annotated[
        OptionalPath, file_option("System file to write. Default: NAME-calibrated.toml.", "FILE.toml")
    ] = None,
    profile: Annotated[
        OptionalPath, option("Measure nodes of this SLURM cluster, and wait for the job.", "FILE.toml")
    ] = None,
    nodes: Annotated[int, count_option("Number of nodes, with --profile. Default: 1.", "N")] = 0,
    quick: Annotated[bool, flag("--quick", "Measure few sizes with few repetitions, for a trial.")] = False,
    suite: Annotated[
        OptionalPaths,
        option("Also measure this suite's operators, for emulated networks; may be repeated.", "SUITE.toml"),
    ] = None,
    json: Json = False,
) -> int:
    """Measure operators, copies, kernel launches and collectives here, and write a system file (hardware rates).

    The measurement takes some minutes, in which no other program should use the machine.  The file is valid for the
    number of ranks of the measurement.
    """
    from repro.accuracy.calibrate.calibration import run_calibration
    from repro.report.text.machine import print_calibration

    found = run_calibration(system, gpus, output, profile, nodes, quick, suite or [], quiet=json)
    return print_calibration(found, json)


@app.command(epilog="Example:  repro validate --svg validation.svg")
def validate(
    results: StoredResults = Path("results"),
    svg: Annotated[
        OptionalPath, file_option("Draw a chart of predicted over published throughput to this file.", "FILE")
    ] = None,
    system: Annotated[
        str,
        option("Also predict this machine's measured runs, with this file.", "FILE.toml", show_default=False),
    ] = "",
    unknowns: Annotated[
        bool, flag("--unknowns", "Print the inputs that cause most uncertainty, and how to measure them.")
    ] = False,
    covered: Annotated[
        OptionalRange,
        option(
            "Print whether LEAST to MOST % of published values lie in intervals widened by the model's error.",
            "LEAST MOST",
            show_default=False,
        ),
    ] = None,
    ledger: Ledger = None,
    details: Details = False,
    json: Json = False,
) -> int:
    """Compare predicted with published throughput and memory, by hardware and software, and with measured steps."""
    if covered is not None:
        from repro.report.text.validate import print_coverage

        alone = svg is None and not system and not unknowns and not json
        given = f"{covered[0]:g} {covered[1]:g}"
        wrong = "cannot be combined with --svg, --system, --unknowns or --json"
        require(alone, "--covered", given, says=wrong)
        right = "two percentages between 0 and 100, the smaller one first"
        require(0 <= covered[0] <= covered[1] <= 100, "--covered", given, right)
        return print_coverage(results, covered, tuple(ledger or ()))
    if unknowns:
        from repro.report.text.validate import print_unknowns

        alone = svg is None and not system
        require(alone, "--unknowns", True, says="cannot be combined with --svg or --system")
        return print_unknowns(results, json, details, tuple(ledger or ()))
    from repro.report.text.validate import print_validation

    return print_validation(results, json, details, svg, system, tuple(ledger or ()))
