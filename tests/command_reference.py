"""Print docs/commands.md: every command with its arguments and options, as `--help` describes them.

python -m tests.command_reference > docs/commands.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from repro.cli import app

HEAD = """# Commands

Every command with its options, as `repro COMMAND --help` prints them. A test compares this page with the commands.
"""


def command_lines(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of one command, or of each command of a group."""
    if hasattr(command, "commands"):
        for inner, subcommand in command.commands.items():
            yield from command_lines(f"{name} {inner}", subcommand)
        return
    yield from (f"\n## {name}\n", f"{plain(command.help)}\n")
    if command.epilog:
        yield f"    {command.epilog.partition('Example:')[2].strip()}\n"
    yield from ("| argument or option | meaning | default |", "|---|---|---|")
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = ", ".join((*parameter.opts, *parameter.secondary_opts))
        is_argument = parameter.param_type_name == "argument"
        is_flag = getattr(parameter, "is_flag", False)
        value = "" if is_flag else parameter.metavar or str(parameter.name).upper()
        shown = (parameter.metavar or names.upper()) if is_argument else f"{names} {value}"
        default = parameter.default if parameter.default not in (None, "", False, ()) else ""
        yield f"| `{plain(shown)}` | {plain(parameter.help)} | {default} |"


def plain(text: str | None) -> str:
    """Return a help text in one line, with characters that Markdown tables need."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def reference() -> str:
    """Return the page."""
    commands: Any = get_command(app)
    lines = (line for name, child in commands.commands.items() for line in command_lines(name, child))
    return "\n".join([HEAD, *lines]).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    print(reference(), end="")
