"""The `repro` program: it parses the command line, and reports errors as one line on standard error.

A command imports the packages that it needs when it is called, so that `--help` starts quickly.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from repro import __version__
from repro.cli.commands import cluster, predict, quality, run, show
from repro.config.errors import ConfigError, short
from repro.util.extras import missing_package_hint

PANEL_COLUMNS = 110
"""Minimum width of a terminal in columns for help in typer's panels, which cut option names in narrower terminals."""


class _Group(TyperGroup):
    """A group of commands; its help without typer's panels lists commands by topic, with their full summaries."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section of the help text for each topic, with the commands of the topic and their summaries."""
        topics: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            topic = getattr(command, "rich_help_panel", None) or "Commands"
            topics.setdefault(topic, []).append((name, (command.help or "").split("\n\n")[0]))
        for topic, commands in topics.items():
            with formatter.section(topic):
                formatter.write_dl(commands)


app = typer.Typer(
    name="repro",
    cls=_Group,
    help="Reproduce the published claims of ZeRO, DeepSpeed, Turing-NLG, Megatron-LM and Yuan 1.0.\n\n"
    "Exit codes: 0 success; 1 failure, or a negative answer (does not fit, is worse, differs from the expectation); "
    "2 bad input; 130 interrupted.",
    epilog="Example:  repro run suites/smoke.toml  &&  repro claims",
    add_completion=False,
    pretty_exceptions_enable=False,
)
TOPICS = {
    "Results": show,
    "Predictions": predict,
    "Runs on this machine": run,
    "Runs on a cluster": cluster,
    "Weights": quality,
}
"""Module that defines the commands of each topic, in the order of `repro --help`."""
for topic, module in TOPICS.items():
    for registered in module.app.registered_commands:
        registered.rich_help_panel = topic
    app.registered_commands += module.app.registered_commands
app.add_typer(cluster.lab, name="lab", cls=_Group, rich_help_panel="Runs on this machine")

# Some versions of typer contain their own copy of click, so `click.ClickException` may be a different class.
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


_UNNAMED = {errno.ENOSPC: "standard output", errno.ENOENT: "the current folder"}
"""File or stream that the message of an `OSError` without file name refers to, by error number."""


def _check_filled(given: list[str]) -> None:
    """Raise `ConfigError` if a command-line argument is empty; the command after `repro lab exec` is not checked."""
    for before, argument in zip(["", *given], given, strict=False):
        if before == "exec":
            return
        option, equals, value = (
            argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        )
        if equals and not value.strip():
            raise ConfigError(option if option.startswith("-") else "argument", value, says="is empty")


class _StreamFile(io.FileIO):
    """File of a standard stream that discards all output after the first error.

    A closed pipe raises no error. A full disk raises one error, and no second one when Python flushes at exit.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.fileno())
            os.close(devnull)
            if not isinstance(error, BrokenPipeError):
                raise
            return super().write(data)


def _open_streams() -> None:
    """Replace standard output and standard error by streams to which every write succeeds.

    A stream may be closed (`>&-`), have an ASCII encoding (`LC_ALL=C`), or be a pipe whose reader ends early
    (`repro run SUITE | head -1`). A closed pipe changes neither the work of the command nor its exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
            if isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
                setattr(sys, name, _without_broken_pipe(stream))


def _without_broken_pipe(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a text stream on the file descriptor of `stream` that discards writes to a closed pipe."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_StreamFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        # PYTHONUNBUFFERED sets `write_through` of a standard stream instead of `line_buffering`.
        line_buffering=stream.line_buffering or stream.write_through,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the command line names, and return its exit code."""
    _open_streams()
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    given = sys.argv[1:] if arguments is None else arguments
    try:
        _check_filled(given)
        app.rich_markup_mode = "rich" if shutil.get_terminal_size().columns >= PANEL_COLUMNS else None
        code = app(given, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _UsageError as error:
        says = error.format_message()
        print(says if says.startswith("Usage:") else f"error: {' '.join(says.split())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not (line := missing_package_hint(error.name or "")):
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):  # typer replaces `KeyboardInterrupt` by `Abort`.
        return 130
    except OSError as error:
        what = error.filename or _UNNAMED.get(error.errno or 0, "file")
        print(f"error: {short(str(what))}: {error.strerror or error}", file=sys.stderr)
        return 1
