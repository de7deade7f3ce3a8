"""What `repro plan --map` prints for people: tp down, pp across, and which of them fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from repro.config import words
from repro.simulate.plan.rows import FULL, OK, OOM, STATES, PlanRow
from repro.util import units
from repro.util.console import stdout
from repro.util.table import table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from repro.simulate.plan.candidates import PlanRequest
    from repro.simulate.plan.plan import MapCell

FITS_ALL_STYLE, FITS_LARGER_STYLE, FITS_NONE_STYLE = "bold green", "yellow", "red"


def print_plan_map(request: PlanRequest, cells: Sequence[MapCell], limits: Sequence[int]) -> None:
    """Print the map of every (tp, pp) that any layout has, and what rules out those that do not fit."""
    console = stdout()
    limits = sorted(limits)
    there = [cell for cell in cells if cell.rows]
    layout = there[0].rows[limits[0]].layout
    strategy = words.layout(layout, degrees=False, batches=True)
    console.print(f"[bold]{request.model.name}[/] on {words.devices(request.gpus, request.system)}")
    console.print(f"{strategy}; GB on the fullest rank, and the least memory that it fits\n")
    columns = sorted({cell.pp for cell in there})
    rows = sorted({cell.tp for cell in there}, reverse=True)
    drawn = table("", *(f"pp {pp}" for pp in columns), left=1 + len(columns), gap=4)
    by_place = {(cell.tp, cell.pp): cell for cell in there}
    for tp in rows:
        answers = [_cell_text(by_place.get((tp, pp)), limits) for pp in columns]
        drawn.add_row(f"tp {tp}", *answers)
    console.print(drawn)
    kinds = {row.evidence for cell in there for row in cell.rows.values()}
    notes = ["-: no such layout (--json says why)"] if len(there) < len(rows) * len(columns) else []
    notes += [">: the model states alone, in closed form"] if STATES in kinds else []
    notes += ["*: reserved, from a full trace; else live, from shallow ones"] if FULL in kinds else []
    notes += ["live bytes, from shallow traces"] if FULL not in kinds else []
    notes += [f"{units.size(request.system.context())} of each memory are beyond the allocator's reach"]
    console.print(textwrap.fill("; ".join(notes), console.width), style="dim", markup=False)
    for limit in limits:
        _print_limit(console, there, limit)


def _cell_text(cell: MapCell | None, limits: Sequence[int]) -> Text:
    """`21.20*` over `fits 40 GB`: what the cell needs, and the least memory that is enough."""
    from rich.text import Text

    if cell is None:
        return Text("-\n", style="dim")
    row = most_informative_row(cell)
    need = row.memory.get("reserved_bytes") if row.evidence == FULL and row.outcome == OK else None
    mark = "*" if need else ""
    more = ">" if row.evidence == STATES else ""
    number = f"{more}{units.gb(need or row.memory['peak_bytes'])}{mark}"
    enough = [limit for limit in limits if cell.rows[limit].outcome == OK]
    if enough:
        style = FITS_ALL_STYLE if enough[0] == limits[0] else FITS_LARGER_STYLE
        return Text(f"{number}\nfits {units.size(enough[0])}", style=style)
    return Text(f"{number}\ndoes not fit", style=FITS_NONE_STYLE)


def most_informative_row(cell: MapCell) -> PlanRow:
    """Return the row of a full trace that fits, else the row with the largest memory."""
    rows = [cell.rows[limit] for limit in sorted(cell.rows)]
    full = [row for row in rows if row.evidence == FULL and row.outcome == OK]
    return full[0] if full else rows[-1]


def _print_limit(console: Console, cells: Sequence[MapCell], limit: int) -> None:
    """One line per term: the cells in which it is too much."""
    by_term: dict[str, list[str]] = {}
    for cell in cells:
        row = cell.rows[limit]
        if row.outcome == OOM:
            by_term.setdefault(row.ruled_out_by, []).append(f"{cell.tp} x {cell.pp}")
    if not by_term:
        console.print(f"\n[bold]{units.size(limit)}[/]: all fit")
        return
    console.print(f"\n[bold]{units.size(limit)}[/] is too little, tp x pp, for")
    for term, places in by_term.items():
        text = f"{term}: {', '.join(places)}"
        console.print(textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="    "), markup=False)
