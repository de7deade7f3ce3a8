"""Plain tables and bars: no frames, so that a line can be copied, cut and searched."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 24
"""Columns of a full bar."""


def table(
    *headings: str, left: int | Container[str] = 1, wrap: Container[str] = (), gap: int = 2, below: int = 0
) -> Table:
    """A table of text (`left`: the first so many columns, or those headings) and, to the right, numbers.

    Nothing is cut, and only the columns of `wrap` are broken into lines.  `gap`: columns between columns; `below`:
    empty lines between rows.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, gap, below, 0), header_style="bold")
    for i, heading in enumerate(headings):
        text = i < left if isinstance(left, int) else heading in left
        made.add_column(heading, justify="left" if text else "right", no_wrap=heading not in wrap)
    return made


def facts() -> Table:
    """A table of two columns, a name and what there is to say of it."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    return made


def bar(console: Console, size: float, whole: float, *, room: bool = True) -> str:
    """`size` of `whole` as a bar of `BAR` columns; with `room`, what is left is shown as well."""
    full, empty = ("█", "░") if console.encoding.startswith("utf") else ("#", ".")
    filled = min(BAR, round(BAR * size / whole)) if whole else 0
    return full * filled + (empty * (BAR - filled) if room else "")
