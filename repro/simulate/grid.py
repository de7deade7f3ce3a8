"""A map of one strategy over tensor-parallel degrees and pipeline stages: which of them fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from repro.config.errors import ConfigError
from repro.simulate.layouts import Request, candidates
from repro.simulate.plan import Planner
from repro.simulate.rows import UNDECIDED, Row
from repro.simulate.workers import Workers


@dataclass
class Cell:
    """One tp and pp of the map."""

    tp: int
    pp: int
    dp: int = 0
    """0 where the GPUs do not divide."""
    rows: dict[int, Row] = field(default_factory=dict)
    """The answer for each limit (bytes of a device's memory); empty where there is no such layout."""
    reason: str = ""
    """Why there is none."""


def grid(
    request: Request,
    tensor: Sequence[int],
    stages: Sequence[int],
    limits: Sequence[int],
    workers: Workers,
    confirmed: Iterable[tuple[int, int]] = (),
) -> list[Cell]:
    """Every tp of ``tensor`` with every pp of ``stages``, as the rest of the layout is given in ``request``.

    ``request.given`` fixes all but tp and pp (else the first candidate is taken).  Rows are ``full`` where
    ``confirmed`` has their (tp, pp) or nothing less tells, else ``states`` or ``shallow``.
    """
    cells = []
    for tp in tensor:
        for pp in stages:
            cell = Cell(tp, pp)
            cells.append(cell)
            asked = replace(request, given={**request.given, "tp": tp, "pp": pp})
            try:
                layout = candidates(asked)[0]
            except ConfigError as error:
                cell.reason = str(error)
                continue
            cell.dp = layout.dp
            cell.rows = {limit: Row(layout, UNDECIDED, "", {}) for limit in limits}
    wanted = set(confirmed)
    planner = Planner(request, workers)
    for limit in limits:
        planner.request = replace(request, limit=limit)
        there = [cell for cell in cells if cell.rows]
        for cell, row in zip(there, planner.rows([c.rows[limit].layout for c in there]), strict=True):
            cell.rows[limit] = row
        again = [c for c in there if c.rows[limit].outcome == UNDECIDED or (c.tp, c.pp) in wanted]
        for cell, row in zip(again, planner.full([c.rows[limit] for c in again]), strict=True):
            cell.rows[limit] = row
    return cells
