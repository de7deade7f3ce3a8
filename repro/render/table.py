"""Plain tables and bars: no frames, so that a line can be copied, cut and searched."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 24
"""Columns of a full bar."""
MIN_TABLE_COLUMNS = 80
"""Width of a terminal below which a table that needs more columns than it has is printed as blocks."""
MIN_FOLD_COLUMNS = 24
"""Width of a column with `overflow="fold"` down to which a path may be folded."""
UNIT = re.compile(r"%|nats|\S+/s|[numµ]?s|[kMGTP]?B")
"""Second line of a heading that is only the unit of the first."""


def table(
    *headings: str, left: int | Container[str] = 1, wrap: Container[str] = (), gap: int = 2, below: int = 0
) -> Table:
    """Return an empty table of text (`left`: the first so many columns, or those headings) and right-aligned numbers.

    Only the columns of `wrap` are broken into lines, between words.  Where the terminal is too narrow for that, each
    row becomes a block of lines `heading: value`.  `gap`: columns between columns; `below`: empty lines between rows.
    """
    made = _table_class()(box=None, pad_edge=False, padding=(0, gap, below, 0), header_style="bold")
    for i, heading in enumerate(headings):
        text = i < left if isinstance(left, int) else heading in left
        made.add_column(heading, justify="left" if text else "right", no_wrap=heading not in wrap)
    return made


def facts() -> Table:
    """Return an empty table of two columns, a name and its description."""
    made = _table_class()(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    return made


@cache
def _table_class() -> type[Table]:
    """Return the class of all tables, which is made late because rich is slow to import."""
    from rich.table import Table
    from rich.text import Text

    class WholeWords(Table):
        """A table that shows the letters of its cells as they are and breaks them only between words."""

        def add_row(self, *cells: Any, **named: Any) -> None:
            """Add a row without markup: rich takes `[engines]` for a style and leaves it out."""
            super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **named)

        def _widths(self, console: Any, options: Any) -> tuple[list[int], list[int]]:
            """Return the widths of the columns with every word in one piece, and with every line in one piece."""
            options = options.update_width(
                sum(len(str(cell)) for c in self.columns for cell in c.cells) + 1000
            )
            ranges = [self._measure_column(console, options, column) for column in self.columns]
            least = [r.maximum if c.no_wrap else r.minimum for r, c in zip(ranges, self.columns, strict=True)]
            for i, column in enumerate(self.columns):
                if column.overflow == "fold":
                    least[i] = min(least[i], MIN_FOLD_COLUMNS)
            return least, [r.maximum for r in ranges]

        def _calculate_column_widths(self, console: Any, options: Any) -> list[int]:
            widths = super()._calculate_column_widths(console, options)
            least, wanted = self._widths(console, options)
            if any(width < words for width, words in zip(widths, least, strict=True)):
                widths = least
                while sum(widths) < options.max_width:
                    short = [i for i, width in enumerate(widths) if width < wanted[i]]
                    if not short:
                        break
                    widths[min(short, key=widths.__getitem__)] += 1
            return widths

        def __rich_console__(self, console: Any, options: Any) -> Any:
            least, wanted = self._widths(console, options)
            room, headed = options.max_width, any(str(column.header) for column in self.columns)
            if sum(least) > room:
                self.padding = (0, 1, self.padding[2], 0)
                least, wanted = self._widths(console, options)
            if sum(least) > room or (headed and room < MIN_TABLE_COLUMNS and sum(wanted) > room):
                return self._blocks(console, room, headed)
            return super().__rich_console__(console, options)

        def _blocks(self, console: Any, room: int, headed: bool) -> Iterator[Text]:
            """Yield the lines of each row; a row whose first cell is empty goes on with the block before it."""
            cells_by_column: list[list[Any]] = [list(column.cells) for column in self.columns]
            columns = [[Text(" ").join(cell.split("\n")) for cell in cells] for cells in cells_by_column]
            headings = [_phrase(str(column.header)) for column in self.columns]
            for number, cells in enumerate(zip(*columns, strict=True)):
                if headed and number and cells[0]:
                    yield Text("")
                fields = (
                    zip(headings, cells, columns, strict=True) if headed else [(str(cells[0]), cells[1], ())]
                )
                for heading, cell, column in fields:
                    if cell or (column is columns[0] and not any(column)):
                        line = Text.assemble((f"{heading}: " if heading else "", "dim"), cell)
                        line.rstrip()
                        for i, part in enumerate(line.wrap(console, room - 2)):
                            yield Text("  " if i else "").append_text(part)
            if headed:
                yield Text("")

    return WholeWords


def _phrase(heading: str) -> str:
    """Return a heading of several lines as one phrase: `step (s)`, `samples/s`, `TFLOP/s a GPU`."""
    name, _, unit = heading.partition("\n")
    text = f"{name} ({unit})" if UNIT.fullmatch(unit) else heading.replace("\n/", "/")
    return " ".join(text.split())


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
