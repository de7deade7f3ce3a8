"""The `repro` command.  It parses and calls; what a command does is in the room that it belongs to.

Nothing but typer is imported here, so that `--help` and the commands that need no torch start at once: a command
imports its room when it is called.
Exit codes are in `--help`; bad input is one `error:` line.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from repro import __version__
from repro.cli.commands import cluster, lab, predict, run, show
from repro.config.errors import ConfigError
from repro.host.extras import missing

app = typer.Typer(
    name="repro",
    help="Reproduce the published claims of ZeRO, DeepSpeed, Turing-NLG, Megatron-LM and Yuan 1.0.\n\n"
    "Exit codes: 0 done; 1 failed, or the answer is no (it does not fit, it is worse, it is not as expected); "
    "2 bad input; 130 interrupted.",
    epilog="Example:  repro run suites/smoke.toml  &&  repro claims",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (run, cluster, show, predict):  # in the order of --help
    app.registered_commands += group.app.registered_commands
app.add_typer(lab.app, name="lab")

# typer brings its own copy of click or uses the installed one, depending on its version.
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


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
    except ModuleNotFoundError as error:
        if not (line := missing(error.name or "")):
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):  # typer turns the one into the other
        return 130
    except BrokenPipeError:  # `repro claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"error: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 1
