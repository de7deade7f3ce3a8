"""A map of one strategy over tensor-parallel degrees and pipeline stages: which of them fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.simulate.plan.candidates import Request, candidates, context_degrees, stages, tensor_degrees
from repro.simulate.plan.planner import Planner
from repro.simulate.plan.rows import FULL, PlanRow, document
from repro.util.workers import Workers


@dataclass
class Cell:
    """One tp and pp of the map."""

    tp: int
    pp: int
    dp: int = 0
    """0 where the GPUs do not divide."""
    rows: dict[int, PlanRow] = field(default_factory=dict)
    """The answer for each limit (bytes of a device's memory); empty where there is no such layout."""
    reason: str = ""
    """Why there is none."""


def axes(request: Request) -> tuple[list[int], list[int]]:
    """The tp and the pp that a plan of `request` would try, each as one axis of the map."""
    tensor = tensor_degrees(request)
    ranks = [tp * cp for tp in tensor for cp in context_degrees(request, tp)]
    return tensor, sorted({pp for one in ranks for pp in stages(request, one)})


def grid(
    request: Request,
    tensor: Sequence[int],
    stages: Sequence[int],
    limits: Sequence[int],
    workers: Workers,
    confirmed: Iterable[tuple[int, int]] = (),
) -> list[Cell]:
    """Every tp of `tensor` with every pp of `stages`, as the rest of the layout is given in `request`.

    What is not given is as in the first candidate: no ZeRO, one sample a micro-batch, nothing recomputed.  Rows
    are `full` where `confirmed` has their (tp, pp) or nothing less tells, else `states` or `shallow`.
    Raises `ConfigError` if no (tp, pp) has a layout.
    """
    cells = []
    layouts: dict[tuple[int, int], Layout] = {}
    refused: list[ConfigError] = []
    for tp in tensor:
        for pp in stages:
            cell = Cell(tp, pp)
            cells.append(cell)
            asked = replace(request, given={**request.given, "tp": tp, "pp": pp})
            try:
                layout = candidates(asked)[0]
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


def map_document(request: Request, cells: Sequence[Cell], limits: Sequence[int]) -> dict[str, Any]:
    """`repro plan --map --json`: every cell with an entry of `repro plan --json` for each limit."""
    found = []
    for cell in cells:
        answers = [document(replace(request, limit=limit), row) for limit, row in cell.rows.items()]
        found.append({"tp": cell.tp, "pp": cell.pp, "dp": cell.dp, "reason": cell.reason, "answers": answers})
    return {
        "model": request.model.name,
        "system": request.system.name,
        "gpus": request.gpus,
        "global_batch": request.global_batch,
        "limits_bytes": list(limits),
        "cells": found,
    }
