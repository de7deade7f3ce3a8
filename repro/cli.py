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
