"""Layout search: which layouts of a model fit a system, in the order of their step times, and the map over tp and pp.

Where the system lacks numbers for times (`no_time`), the seconds at peak rates decide the order. Rows whose memory the
allocator decides are traced in full (`repro.simulate.plan.planner`), and so are the first rows. A plan that shows few
rows leaves a row open once enough other rows are faster than its lower bound, or than its shallow estimate. The first
rows are those of a plan that decides every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.simulate.plan.candidates import (
    PlanRequest,
    candidates,
    context_degrees,
    pipeline_degrees,
    tensor_degrees,
)
from repro.simulate.plan.planner import Planner
from repro.simulate.plan.rows import FULL, OK, OOM, STATES, PlanRow, plan_entry, plan_order
from repro.util.processes import pause_garbage_collection
from repro.util.workers import Workers

FULLY_TRACED_ROWS = 3
"""Number of first rows that are traced in full."""
COMPARED_ROWS = 12
"""Minimum number of first rows that are compared in all draws of the unknowns, because any may be the fastest."""
ROWS_DECIDED_AHEAD = 2
"""Number of rows to decide at once, as a multiple of the wanted rows, so that all workers are busy."""


@dataclass
class Plan:
    """Result of a layout search: all layouts, best first."""

    rows: list[PlanRow]
    traces: int
    """Number of traces that were made."""
    no_time: str
    """Reason why rows have no times; empty if they have times."""


@pause_garbage_collection()
def search_layouts(request: PlanRequest, workers: Workers, shown: int = 0, *, whole: bool = True) -> Plan:
    """Return all sensible layouts, best first; the first `shown` rows, at least `COMPARED_ROWS`, have intervals.

    `whole`: all other rows are timed too; otherwise, rows stay open if they cannot be among the first. With `shown` =
    0, no row has an interval. Raises `ConfigError` if there are no layouts.
    """
    compared = max(shown, COMPARED_ROWS) if shown else 0
    layouts = candidates(request)
    if request.system.device.peak_flops:
        precision = layouts[0].precision
        try:
            request.system.peak(precision)
        except ConfigError as error:
            raise error.for_key("precision") from None
    planner = Planner(request, workers)
    rows = planner.estimated(layouts)
    rows += planner.estimated(_with_partitioned_activations(request, rows))
    planner.open(rows)
    while True:
        if planner.no_time:
            for row in rows:
                row.time, row.least_s = {}, 0.0
            planner.send([row for row in rows if row.outcome == OK])
        rows.sort(key=plan_order)
        if some := _rows_to_decide(rows, len(rows) if whole else compared):
            made = planner.decide(some)
        else:
            first = [row for row in rows[:FULLY_TRACED_ROWS] if row.outcome == OK and row.evidence != FULL]
            if not first:
                break
            made = planner.full(first)
        # Rows that turn out to be slower, or not to fit, change the order.
        decided = {row.layout: row for row in made}
        rows = [decided.get(row.layout, row) for row in rows]
        more = planner.estimated(_with_partitioned_activations(request, made))
        planner.open(more)
        rows += more
    planner.send(rows if whole else rows[:compared])
    planner.intervals([row for row in rows[:compared] if row.outcome == OK and row.time])
    return Plan(rows, planner.traces, planner.no_time)


def _rows_to_decide(rows: Sequence[PlanRow], wanted: int) -> list[PlanRow]:
    """Return the next open rows that may be among the first `wanted` rows; `rows` are best first."""
    fits = [row for row in rows if row.outcome == OK]
    open_ones = [row for row in fits if row.open]
    known = [row.seconds for row in fits if not row.open]
    if len(known) >= wanted:
        open_ones = [row for row in open_ones if row.seconds <= known[wanted - 1]]
    return open_ones[: ROWS_DECIDED_AHEAD * wanted]


def _with_partitioned_activations(request: PlanRequest, rows: Iterable[PlanRow]) -> list[Layout]:
    """Return layouts with P_a for rows that do not fit without P_a for other reasons than model states."""
    if "pa" in request.given:
        return []
    return [
        replace(row.layout, pa=True)
        for row in rows
        if row.evidence != STATES
        and row.outcome == OOM
        and row.layout.recompute
        and row.layout.tp > 1
        and not row.layout.sp
    ]


@dataclass
class MapCell:
    """One pair (tp, pp) of the map."""

    tp: int
    pp: int
    dp: int = 0
    """Data-parallel degree; 0 if tp x pp does not divide the GPUs."""
    rows: dict[int, PlanRow] = field(default_factory=dict)
    """The row for each limit (bytes of a device's memory); empty if no layout exists."""
    reason: str = ""
    """Reason why no layout exists."""


def map_axes(request: PlanRequest) -> tuple[list[int], list[int]]:
    """Return the tp and the pp that a plan of `request` would try, as the two axes of the map."""
    tensor = tensor_degrees(request)
    ranks = [tp * cp for tp in tensor for cp in context_degrees(request, tp)]
    return tensor, sorted({pp for one in ranks for pp in pipeline_degrees(request, one)})


def search_map(
    request: PlanRequest,
    tensor: Sequence[int],
    stages: Sequence[int],
    limits: Sequence[int],
    workers: Workers,
    confirmed: Iterable[tuple[int, int]] = (),
) -> list[MapCell]:
    """Return every pair of tp and pp, with the rest of the layout from `request`.

    Keys without a value are those of the first candidate: no ZeRO, one sample per micro-batch, no recomputation. Rows
    are `full` if `confirmed` contains (tp, pp) or only a full trace decides the row, and `states` or `shallow`
    otherwise. Raises `ConfigError` if no (tp, pp) has a layout.
    """
    cells = []
    layouts: dict[tuple[int, int], Layout] = {}
    refused: list[ConfigError] = []
    for tp in tensor:
        for pp in stages:
            cell = MapCell(tp, pp)
            cells.append(cell)
            fixed = replace(request, given={**request.given, "tp": tp, "pp": pp})
            try:
                layout = candidates(fixed)[0]
            except ConfigError as error:
                cell.reason = str(error)
                refused.append(error)
                continue
            cell.dp = layout.dp
            layouts[tp, pp] = layout
    there = [cell for cell in cells if (cell.tp, cell.pp) in layouts]
    if not there and refused:
        raise refused[0]
    wanted = set(confirmed)
    planner = Planner(request, workers)
    for limit in limits:
        planner.request = replace(request, limit=limit)
        for cell, row in zip(there, planner.rows([layouts[c.tp, c.pp] for c in there]), strict=True):
            cell.rows[limit] = row
        again = [c for c in there if c.rows[limit].evidence != FULL and (c.tp, c.pp) in wanted]
        for cell, row in zip(again, planner.full([c.rows[limit] for c in again]), strict=True):
            cell.rows[limit] = row
    return cells


def map_document(request: PlanRequest, cells: Sequence[MapCell], limits: Sequence[int]) -> dict[str, Any]:
    """Return the document of `repro plan --map --json`: each cell with an entry of `repro plan --json` per limit."""
    found = []
    for cell in cells:
        answers = [plan_entry(replace(request, limit=limit), row) for limit, row in cell.rows.items()]
        found.append({"tp": cell.tp, "pp": cell.pp, "dp": cell.dp, "reason": cell.reason, "answers": answers})
    return {
        "model": request.model.name,
        "system": request.system.name,
        "gpus": request.gpus,
        "global_batch": request.global_batch,
        "limits_bytes": list(limits),
        "cells": found,
    }
