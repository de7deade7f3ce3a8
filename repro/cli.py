"""The ``repro`` command.  It parses and calls; what a command does is in the room that it belongs to.

Nothing but typer is imported here, so that ``--help`` and the commands that need no torch start at once.
Exit codes: 0 done, 1 failed, 2 bad input (one ``error:`` line), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from repro import __version__
from repro.config.errors import ConfigError
from repro.simulate.options import layout_options

app = typer.Typer(
    name="repro",
    help="Reproduce the published claims of ZeRO, DeepSpeed, Turing-NLG, Megatron-LM and Yuan 1.0.",
    epilog="Example:  repro run suites/smoke.toml  &&  repro claims",
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer brings its own copy of click or uses the installed one, depending on its version.
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Results = Annotated[Path, typer.Option("--results", help="Where records are stored.", metavar="DIR")]
ModelName = Annotated[str, typer.Option("--model", help="A model's name, or its file.", metavar="M")]
SystemName = Annotated[str, typer.Option("--system", help="A system's name, or its file.", metavar="S")]
Gpus = Annotated[int, typer.Option("--gpus", help="Devices: tp x pp x dp.", metavar="N")]
Seq = Annotated[
    int, typer.Option(help="Tokens of a sample; the model's longest by default.", show_default=False)
]
MemoryLimit = Annotated[
    str,
    typer.Option(help="Take the device's memory for this much: 32GB, 32GiB or 16e9.", metavar="SIZE"),
]
Expandable = Annotated[bool, typer.Option("--expandable", help="torch's expandable segments.")]


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


@app.command(epilog="Example:  repro claims zero-mem-formula-stages")
def claims(
    claim: Annotated[str, typer.Argument(help="Show this claim in full.", metavar="ID")] = "",
    results: Results = Path("results"),
    json: Json = False,
) -> int:
    """Show the ledger: published value, conditions, source, evidence and verdict."""
    from repro.claims.show import command

    return command(claim, json, results)


@app.command(epilog="Example:  repro models gpt2-1.5b")
def models(
    name: Annotated[str, typer.Argument(help="Show this model in full.", metavar="NAME")] = "",
    json: Json = False,
) -> int:
    """Show model files with exact parameter counts and the memory of their states."""
    from repro.models.show import command

    return command(name, json)


@app.command(epilog="Example:  repro systems dgx2")
def systems(
    name: Annotated[
        str, typer.Argument(help="Show this system, or the one in this file, in full.", metavar="NAME")
    ] = "",
    json: Json = False,
) -> int:
    """Show system files: devices, memory and links, each number with its source."""
    from repro.systems.show import command

    return command(name, json)


@app.command(
    epilog="Example:  repro simulate --model turing-nlg-17b --system dgx2 --gpus 256 --tp 4 --zero 1"
)
@layout_options
def simulate(
    model: ModelName,
    system: SystemName,
    gpus: Gpus,
    layout: dict[str, Any],
    seq: Seq = 0,
    memory_limit: MemoryLimit = "",
    expandable: Expandable = False,
    timeline: Annotated[
        str, typer.Option(help="Write when everything happens, for ui.perfetto.dev.", metavar="FILE.json")
    ] = "",
    json: Json = False,
) -> int:
    """Trace one step in shape only: does it fit, what fills the memory, what is sent where, how long it takes."""
    from repro.simulate.command import simulate as command

    return command(model, system, gpus, layout, seq, memory_limit, expandable, timeline, json)


@app.command(epilog="Example:  repro fit --system dgx2 --gpus 64 --zero 1 --micro-batch 8 --recompute")
@layout_options
def fit(
    system: SystemName,
    gpus: Gpus,
    layout: dict[str, Any],
    model: Annotated[str, typer.Option("--model", help="Take sizes from this model.", metavar="M")] = "",
    hidden: Annotated[
        int, typer.Option(help="Width.  Without: one that about hidden/64 layers fill.", show_default=False)
    ] = 0,
    heads: Annotated[
        int, typer.Option(help="Attention heads; hidden/128 by default.", show_default=False)
    ] = 0,
    vocab: Annotated[int, typer.Option(help="Vocabulary; 51200 by default.", show_default=False)] = 0,
    seq: Seq = 0,
    search: Annotated[str, typer.Option(help="layers, or micro-batch (of --model).")] = "layers",
    measure: Annotated[bool, typer.Option("--measure", help="Try on the devices of this machine.")] = False,
    as_rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="With --measure: be this rank alone, of --of; collectives are left out.", metavar="R"
        ),
    ] = None,
    of: Annotated[int, typer.Option(help="The ranks of which --as-rank is one.", show_default=False)] = 0,
    memory_limit: MemoryLimit = "",
    expandable: Expandable = False,
    json: Json = False,
) -> int:
    """Find the largest model that fits, the first that does not, and the term that is too much."""
    sizes = {"hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq}
    if measure:
        from repro.launch.fit import command as measured

        return measured(system, gpus, layout, model, sizes, search, memory_limit, as_rank, of, json)
    from repro.simulate.command import fit as command

    return command(system, gpus, layout, model, sizes, search, memory_limit, expandable, json)


@app.command(epilog="Example:  repro plan --model turing-nlg-17b --system dgx2 --gpus 256 --global-batch 512")
@layout_options
def plan(
    model: ModelName,
    system: SystemName,
    gpus: Gpus,
    layout: dict[str, Any],
    seq: Seq = 0,
    memory_limit: MemoryLimit = "",
    expandable: Expandable = False,
    as_map: Annotated[
        bool,
        typer.Option(
            "--map", help="Draw tp against pp of one strategy; --memory-limit may be several: 40GB,80GB."
        ),
    ] = False,
    tokens: Annotated[
        float, typer.Option(help="Of a whole training: how long it takes.", metavar="N", show_default=False)
    ] = 0.0,
    price_per_gpu_hour: Annotated[
        float, typer.Option(help="What training on --tokens costs.", metavar="PRICE", show_default=False)
    ] = 0.0,
    json: Json = False,
) -> int:
    """List every sensible layout: does it fit, and how long is a step; best first.  Options fix what is varied."""
    from repro.simulate.command import plan as command

    price = price_per_gpu_hour
    return command(model, system, gpus, layout, seq, memory_limit, expandable, json, as_map, tokens, price)


@app.command(epilog="Example:  repro calibrate --system local --gpus 2 --output here.toml")
def calibrate(
    system: Annotated[
        str, typer.Option(help="local: processor cores and gloo; local-gpu: GPUs and NCCL.", metavar="NAME")
    ],
    gpus: Annotated[
        int,
        typer.Option(
            help="Ranks; by default every GPU, or 2 on processor cores.", metavar="N", show_default=False
        ),
    ] = 0,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The system file; by default NAME-calibrated.toml here.", metavar="FILE.toml"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and repeats: to try it out.")] = False,
    json: Json = False,
) -> int:
    """Measure this machine (operators, copies, launches, collectives by size) and write a system file.

    It takes a minute or two, in which nothing else should run.  A file speaks for the number of ranks that it
    was measured with, on this one machine.
    """
    from repro.calibrate.command import command

    return command(system, gpus, output, quick, json)


@app.command(epilog="Example:  repro validate --svg validation.svg")
def validate(
    results: Results = Path("results"),
    svg: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Draw published against predicted to this file.", metavar="FILE"),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            help="Also predict what was measured here, on this file of `repro calibrate`.",
            metavar="FILE.toml",
            show_default=False,
        ),
    ] = "",
    json: Json = False,
) -> int:
    """Compare published throughput with what is predicted, by family; and predicted steps with measured ones."""
    from repro.report.validate_show import command

    return command(results, json, svg, system)


@app.command(epilog="Example:  repro report --results results --out reports/out")
def report(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(help="Where the report is written.", metavar="DIR")] = Path(
        "reports/out"
    ),
    json: Json = False,
) -> int:
    """Write tables and plots of the stored records to index.html."""
    from repro.report.build import command

    return command(results, out, json)


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
    json: Json = False,
    svg: Annotated[bool, typer.Option("--svg", help="Draw it as an SVG picture.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the SVG picture to this file.", metavar="FILE"),
    ] = None,
) -> int:
    """Print or draw a pipeline schedule with its bubble and what it keeps in memory."""
    from repro.report.schedule import command

    return command(pp, micro_batches, chunks, name, forward, backward, json, svg, out)


@app.command(epilog="Example:  repro doctor --json")
def doctor(json: Json = False) -> int:
    """Show what works on this machine and what it enables."""
    from repro.measure.doctor import command

    return command(json)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _UsageError as error:
        print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):  # typer turns the one into the other
        return 130
    except BrokenPipeError:  # `repro claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"error: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 1
