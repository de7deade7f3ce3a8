"""Terminal output: consoles, tables without frames, and JSON documents."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


MIN_COLUMNS = 20
"""Minimum width of the output in columns, even if the environment variable `COLUMNS` is smaller."""
PAGE_COLUMNS = 100
"""Width, in columns, of output to a pipe or a file if the environment variable `COLUMNS` is not set."""
MIN_TABLE_COLUMNS = 80
"""Minimum terminal width, in columns, for tables with wrapped cells; below it, each row becomes a block of lines."""


def stdout(least: int = 0) -> Console:
    """Return a console for standard output, without highlighting of numbers and names.

    `least`: minimum width in columns if neither a terminal nor the environment variable `COLUMNS` sets the width.
    """
    from rich.console import Console

    console = Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    is_given = console.is_terminal or (columns.isdigit() and int(columns) > 0)
    console.width = max(console.width, MIN_COLUMNS if is_given else max(least, MIN_COLUMNS))
    return console


def stderr() -> Console:
    """Return a console for standard error, without highlighting of numbers and names."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def show_progress(text: str) -> AbstractContextManager[object]:
    """Return a context manager that shows `text` and the elapsed time if standard error is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=stderr(), refresh_per_second=2, transient=True)
    shown.add_task(text, total=None)
    return shown


def print_json(document: Any) -> None:
    """Print `document` as indented JSON to standard output."""
    import json

    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_page(*parts: str | Table, command: str = "", console: Console | None = None) -> None:
    """Print paragraphs and tables, with empty lines around each table; skip empty paragraphs and tables.

    Lines of a paragraph break between words.  `command`: command that the user may enter next, printed after `Next:`.
    """
    console = console or stdout(PAGE_COLUMNS)
    after_table = False
    for part in parts:
        is_text = isinstance(part, str)
        if part if isinstance(part, str) else part.row_count:
            if after_table or not is_text:
                console.print()
            if isinstance(part, str):
                part = "\n".join(textwrap.wrap(part, console.width, break_on_hyphens=False))
            console.print(part, markup=False)
            after_table = not is_text
    if command:
        console.print(end="\n" * after_table)
        columns = console.width - 4
        lines = textwrap.wrap(f"Next: {command}", columns, break_on_hyphens=False, break_long_words=False)
        console.print(" \\\n  ".join(lines), markup=False, soft_wrap=True)


def new_table(
    *headings: str,
    rows: Iterable[Sequence[str]] = (),
    left: int | Container[str] = 1,
    wrap: Container[str] = (),
    gap: int = 2,
    below: int = 0,
) -> Table:
    """Return a table without a frame.

    `left`: headings of the left-aligned columns, or the number of left-aligned columns; others are right-aligned.
    `wrap`: headings of the columns whose cells may have several lines.  In a terminal that is too narrow, each row
    becomes a block of lines `heading: value`.  `gap`: spaces between columns.  `below`: empty lines between rows.
    """
    made = _whole_words(box=None, pad_edge=False, padding=(0, gap, below, 0), header_style="bold")
    for i, heading in enumerate(headings):
        text = i < left if isinstance(left, int) else heading in left
        made.add_column(heading, justify="left" if text else "right", no_wrap=heading not in wrap)
    for row in rows:
        made.add_row(*row)
    return made


def new_facts_table() -> Table:
    """Return an empty table of two columns without headings: a name and its description."""
    made = new_table("", "", left=2, wrap=("",))
    made.show_header, made.columns[0].style, made.columns[0].no_wrap = False, "dim", True
    return made


def _whole_words(**settings: Any) -> Table:
    """Return a table that prints cells without markup and breaks their lines only between words."""
    from rich.table import Table
    from rich.text import Text

    class WholeWords(Table):
        def add_row(self, *cells: Any, **named: Any) -> None:
            """Add a row of plain text, because rich interprets `[engines]` in a string as a style and omits it."""
            super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **named)

        def _widths(self, console: Any, options: Any) -> tuple[list[int], list[int]]:
            """Return for each table column the width that breaks no word, and the width that needs no line break."""
            ranges = [self._measure_column(console, options.update_width(10**6), c) for c in self.columns]
            least = [r.maximum if c.no_wrap else r.minimum for r, c in zip(ranges, self.columns, strict=True)]
            return least, [r.maximum for r in ranges]

        def _calculate_column_widths(self, console: Any, options: Any) -> list[int]:
            widths = super()._calculate_column_widths(console, options)
            least, wanted = self._widths(console, options)
            if any(map(int.__lt__, widths, least)):
                widths = least
                while sum(widths) < options.max_width:
                    widths[min(range(len(widths)), key=lambda i: (widths[i] >= wanted[i], widths[i]))] += 1
            return widths

        def __rich_console__(self, console: Any, options: Any) -> Any:
            (least, wanted), columns = self._widths(console, options), options.max_width
            if sum(least) > columns:
                self.padding = (0, 1, self.padding[2], 0)
                least, wanted = self._widths(console, options)
            is_headed = any(column.header for column in self.columns)
            if sum(least) > columns or (is_headed and sum(wanted) > columns and columns < MIN_TABLE_COLUMNS):
                return self._blocks(console, columns, is_headed)
            return super().__rich_console__(console, options)

        def _blocks(self, console: Any, columns: int, is_headed: bool) -> Iterator[Text]:
            """Yield each row as lines `heading: value`; a row with an empty first cell continues the previous row."""
            rows: list[tuple[Any, ...]] = list(zip(*(column.cells for column in self.columns), strict=True))
            has_names = any(row[0] for row in rows)
            for number, row in enumerate(rows):
                names, cells = [" ".join(str(column.header).split()) for column in self.columns], row
                if not is_headed:
                    names, cells = [str(row[0])], row[1:]
                elif number and row[0]:
                    yield Text("")
                for i, (name, cell) in enumerate(zip(names, cells, strict=True)):
                    if cell or (i == 0 and not has_names):
                        value = Text(" ").join(cell.split("\n"))
                        line = Text.assemble((f"{name}: " if name else "", "dim"), value)
                        line.rstrip()
                        for j, part in enumerate(line.wrap(console, columns - 2)):
                            yield Text("  " if j else "").append_text(part)
            if is_headed:
                yield Text("")

    return WholeWords(**settings)


def sparkline(console: Console, values: Sequence[float | None], columns: int = 10) -> str:
    """Return a curve of `values` as text of at most `columns` characters.

    Each character shows a mean of consecutive values, by its height in the range of all means; a blank stands for None.
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
