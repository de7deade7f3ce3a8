"""Plain tables and bars: no frames, so that a line can be copied, cut and searched."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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
    made = _plain(box=None, pad_edge=False, padding=(0, gap, below, 0), header_style="bold")
    for i, heading in enumerate(headings):
        text = i < left if isinstance(left, int) else heading in left
        made.add_column(heading, justify="left" if text else "right", no_wrap=heading not in wrap)
    return made


def _plain(**settings: Any) -> Table:
    """A table that shows its cells' letters as they are: rich takes `[engines]` for a style and leaves it out."""
    from rich.table import Table
    from rich.text import Text

    class Plain(Table):
        def add_row(self, *cells: Any, **named: Any) -> None:
            super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **named)

    return Plain(**settings)


def facts() -> Table:
    """A table of two columns, a name and what there is to say of it."""
    made = _plain(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    return made


def bar(console: Console, size: float, whole: float, *, room: bool = True) -> str:
    """`size` of `whole` as a bar of `BAR` columns; with `room`, what is left is shown as well."""
    full, empty = ("█", "░") if console.encoding.startswith("utf") else ("#", ".")
    filled = min(BAR, round(BAR * size / whole)) if whole else 0
    return full * filled + (empty * (BAR - filled) if room else "")


def sparkline(console: Console, values: Sequence[float | None], columns: int = 10) -> str:
    """The course of `values` in at most so many columns, the least at the bottom; a blank where there is none.

    More values than columns: each column is the mean of as many as come to it.
    """
    levels = "▁▂▃▄▅▆▇█" if console.encoding.startswith("utf") else "_.-~=+*#"
    count = min(columns, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    parts = [[v for v in values[a:b] if v is not None] for a, b in pairwise(edges)]
    means = [sum(part) / len(part) if part else None for part in parts]
    seen = [mean for mean in means if mean is not None]
    low, span = (min(seen), max(seen) - min(seen)) if seen else (0.0, 0.0)
    top = len(levels) - 1
    return "".join(
        " " if mean is None else levels[round(top * (mean - low) / span) if span else 0] for mean in means
    )
