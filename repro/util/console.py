"""The terminal: one way to get it for standard output, one for standard error."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


NARROWEST = 20
"""Minimum width of the output in columns, whatever `COLUMNS` is."""
WIDE = 120
"""Width in columns of a wide page that is written to a pipe or a file while `COLUMNS` is not set."""


def stdout(least: int = 0) -> Console:
    """Return a console for standard output, without highlighting.

    `least`: its minimum width in columns where neither a terminal nor `COLUMNS` gives one.
    """
    from rich.console import Console

    console = Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    is_given = console.is_terminal or (columns.isdigit() and int(columns) > 0)
    console.width = max(console.width, NARROWEST if is_given else max(least, NARROWEST))
    return console


def stderr() -> Console:
    """Standard error as it is now."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def waiting(text: str) -> AbstractContextManager[object]:
    """Inside, a person at a terminal sees what is being done and for how long; nobody else sees anything."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=stderr(), refresh_per_second=2, transient=True)
    shown.add_task(text, total=None)
    return shown


def print_json(document: Any) -> None:
    """`document` as the only thing on standard output, for programs and for people who look at it."""
    import json

    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
