"""Layout search: which layouts of a model fit a system, in the order of their step times, and a table over tp and pp.

Lower bounds exclude layouts that cannot fit. The others are simulated, the least lower bound of the step time first. A
plan that shows few rows leaves a layout open if enough simulated layouts are faster than its lower bound. Its first
rows are therefore those of a plan that simulates every layout. Where the system lacks numbers for times (`no_time`),
the seconds at peak rates decide the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from repro.simulate.plan.rows import OK, OOM, OPEN, STATES, PlanRow, plan_entry, plan_order, rank_rows
from repro.util.processes import Workers, pause_garbage_collection

COMPARED_ROWS = 12
"""Minimum number of first layouts whose order a plan checks in random draws of all uncertain inputs."""
BEGUN_PER_WORKER = 2
"""Number of simulations that are queued per worker process, so that no worker is idle."""


@dataclass
class Plan:
    """Result of a layout search: a row for each layout, best first."""

    rows: list[PlanRow]
    simulated: int
    """Number of simulated layouts."""
    no_time: str
    """Reason why the plan has no step times; empty if it has them."""


@pause_garbage_collection()
def search_layouts(
    request: PlanRequest, workers: Workers, shown: int = 0, *, exhaustive: bool = True
) -> Plan:
    """Return a plan of all candidate layouts of `request`, best first.

    The first rows are those with the shortest step times at the best values, in the order of `request.rank_by`. There
    are max(`shown`, `COMPARED_ROWS`) of them, with intervals; with `shown` = 0, no row has an interval. `exhaustive`:
    simulate all layouts that may fit; otherwise, layouts that cannot be among the first rows are not simulated. Raises
    `ConfigError` if there are no layouts.
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
    rows: dict[Layout, PlanRow] = {}
    waiting: list[PlanRow] = []
    """Layouts that may fit, before their simulation; the layout with the least lower bound of step time is last."""

    def add_bounded(layouts: Sequence[Layout]) -> None:
        found = planner.bounded(layouts)
        rows.update((row.layout, row) for row in found)
        waiting.extend(row for row in found if row.outcome == OPEN)
        waiting.sort(key=plan_order, reverse=True)

    add_bounded(layouts)
    add_bounded(_with_partitioned_activations(request, rows.values()))
    begun: dict[Layout, Callable[[], PlanRow]] = {}
    most_begun = BEGUN_PER_WORKER * workers.count if workers.count > 1 else 1
    while True:
        limit = _seconds_of_place(rows.values(), compared)
        while waiting and len(begun) < most_begun and (exhaustive or waiting[-1].least_s <= limit):
            layout = waiting.pop().layout
            begun[layout] = planner.begin(layout, interval_below_s=limit)
        if not begun:
            break
        layout = next(iter(begun))  # Simulations are awaited in start order, so plans are reproducible.
        had_times, rows[layout] = not planner.no_time, begun.pop(layout)()
        add_bounded(_with_partitioned_activations(request, [rows[layout]]))
        if had_times and planner.no_time:
            planner.remove_times(rows.values())
            waiting.sort(key=plan_order, reverse=True)
    ordered = sorted(rows.values(), key=plan_order)
    first = [row for row in ordered[:compared] if row.outcome == OK and row.time]
    others = ordered[len(first) :]
    for row in others:
        row.interval = None
        if row.time:
            row.time["interval"] = None
    return Plan([*rank_rows(first, request.rank_by), *others], planner.simulated, planner.no_time)


def _seconds_of_place(rows: Iterable[PlanRow], place: int) -> float:
    """Return the step time of the `place`-th fastest layout with enough free memory; infinity if there is none."""
    known = sorted(row.seconds for row in rows if row.outcome == OK and not row.is_tight)
    return 0.0 if not place else known[place - 1] if len(known) >= place else float("inf")


def _with_partitioned_activations(request: PlanRequest, rows: Iterable[PlanRow]) -> list[Layout]:
    """Return layouts with partitioned activations (P_a) for layouts that do not fit but whose model states do."""
    if "pa" in request.given:
        return []
    fuller = [row.layout for row in rows if row.outcome == OOM and row.evidence != STATES]
    return [
        replace(layout, pa=True)
        for layout in fuller
        if layout.has_checkpoints and layout.tp > 1 and not layout.sp and not layout.pa
    ]


@dataclass
class MapCell:
    """Cell of the table of `repro plan --map`, which shows for each pair of tp and pp whether the model fits."""

    tp: int
    pp: int
    dp: int = 0
    """Data-parallel degree; 0 if tp x pp does not divide the GPUs."""
    rows: dict[int, PlanRow] = field(default_factory=dict)
    """Outcome and memory of this layout for each memory limit in bytes per device; empty if no layout exists."""
    reason: str = ""
    """Reason why no layout with this tp and pp is possible; empty if one is possible."""


def map_axes(request: PlanRequest) -> tuple[list[int], list[int]]:
    """Return the values of tp and of pp that a plan of `request` tries, as the two axes of `repro plan --map`."""
    tensor = tensor_degrees(request)
    ranks = [tp * cp for tp in tensor for cp in context_degrees(request, tp)]
    return tensor, sorted({pp for one in ranks for pp in pipeline_degrees(request, one)})


def search_map(
    request: PlanRequest,
    tensor: Sequence[int],
    stages: Sequence[int],
    limits: Sequence[int],
    workers: Workers,
) -> list[MapCell]:
    """Return whether the model fits, for every pair of tp and pp. The other layout keys are those of `request`.

    Defaults of these keys are no ZeRO, one sample per micro-batch, and no recomputation. Step times are not predicted.
    Raises `ConfigError` if no (tp, pp) has a layout.
    """
    cells, layouts = [MapCell(tp, pp) for tp in tensor for pp in stages], []
    refused: list[ConfigError] = []
    for cell in cells:
        fixed = replace(request, given={**request.given, "tp": cell.tp, "pp": cell.pp})
        try:
            layouts.append(candidates(fixed)[0])
            cell.dp = layouts[-1].dp
        except ConfigError as error:
            cell.reason = str(error)
            refused.append(error)
    if not layouts and refused:
        raise refused[0]
    possible = [cell for cell in cells if cell.dp]
    for limit in limits:
        planner = Planner(replace(request, limit=limit), workers)
        for cell, row in zip(possible, planner.rows(layouts), strict=True):
            cell.rows[limit] = row
    return cells


def map_document(request: PlanRequest, cells: Sequence[MapCell], limits: Sequence[int]) -> dict[str, Any]:
    """Return the document of `repro plan --map --json`: for each pair of tp and pp, one plan entry per memory limit."""
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
