"""`repro validate --unknowns`: which numbers somebody with the hardware should measure, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repro.accuracy.validate.unknowns import SHOWN, Input, ShoppingList, by_claim, known_as
from repro.util import units
from repro.util.console import WIDE, print_json, stdout
from repro.util.table import facts, table

if TYPE_CHECKING:
    from rich.console import Console

    from repro.accuracy.validate.implied import Implied


def print_unknowns(results: Path, json: bool, own: Sequence[Path] = ()) -> int:
    """List the unknowns of what the store `results` predicts; 0.  `own`: ledger files beside the packaged ones."""
    from repro.report import evidence
    from repro.results.store import say

    seen = evidence.read(results, own)
    say(seen.torn)
    if json:
        print_json({**seen.shopping_list.as_dict(), "implied": [one.as_dict() for one in seen.implied]})
    else:
        console = stdout(WIDE)
        print_measurements(seen.shopping_list, console)
        print_implied(seen.implied, console)
    return 0


MIN_LISTED_WIDTH_SHARE = 0.001
"""Minimum share of the width of all intervals for which an unknown is listed."""


def print_measurements(found: ShoppingList, console: Console) -> None:
    """Print the first unknowns in detail, and one line for each other unknown."""
    from rich.text import Text

    if not found.inputs:
        console.print("No row of this store has a predicted time that unknown numbers leave in doubt.")
        return
    console.print(Text(found.words))
    for number, one in enumerate(found.inputs[:SHOWN], 1):
        console.print()
        console.print(Text(f"{number}. {one.key} of {one.system}", style="bold cyan"))
        console.print(_facts(one, found))
    rest = [one for one in found.inputs[SHOWN:] if one.share >= MIN_LISTED_WIDTH_SHARE]
    headings = ("also", "of", "value [range]", "rows", "settles", "width")
    grid = table(*headings, left=2, wrap=headings[:2])
    for one in rest:
        counts = str(len(one.rows)), str(len(one.settles)), units.percent(one.share)
        grid.add_row(one.key, one.system, known_as(one), *counts)
    console.print()
    console.print(grid)
    few = len(found.inputs) - SHOWN - len(rest)
    if few > 0:
        console.print(
            f"{few} more carry less than {units.percent(MIN_LISTED_WIDTH_SHARE)} of the width each: --json has them."
        )


def print_implied(found: Sequence[Implied], console: Console) -> None:
    """Print the value of each unknown that the rows imply, contradictions first."""
    from rich.text import Text

    if not found:
        return
    console.print()
    console.print(Text("What the sources imply, all other unknowns at their best values", style="bold cyan"))
    grid = table("unknown", "of", "what its rows need", left=3, wrap=("what its rows need",), below=1)
    for one in sorted(found, key=lambda one: one.contradiction is None):
        grid.add_row(one.key, one.system, one.words)
    console.print(grid)
    console.print(CONTRADICTION_NOTE, style="dim", markup=False)


CONTRADICTION_NOTE = (
    "Where no single value serves all rows, their sources contradict each other or the model is wrong for some of "
    "them: which of the two cannot be told from them."
)


def _facts(one: Input, found: ShoppingList) -> object:
    how, grid = one.measured_by, facts()
    grid.add_row("value [range]", known_as(one))
    grid.add_row(
        "rows",
        f"settles {len(one.settles)} of {found.rows}, moves {len(one.rows)}; {units.percent(one.share)} of the width",
    )
    grid.add_row(
        "possible",
        f"{len(one.possible)} of {found.possible} verdicts{': ' * bool(one.possible)}{by_claim(one.possible)}",
    )
    grid.add_row("measured by", f"{how.command}: {how.fact}" if how.command else "not by repro calibrate")
    grid.add_row("", how.how)
    grid.add_row("source", one.source)
    return grid
