"""Which layouts of a model fit a system, what they hold and send, and which come first.

Where the system lacks the numbers for times (`no_time`), the least time at peak rates comes first instead.  Rows that
the allocator decides are traced in full (`repro.simulate.plan.planner`), and so are the first ones of the plan.

A plan that shows a few rows decides no more than it takes to know them: a row is left open once so many others are
faster than it can be at all (`repro.simulate.plan.least`), or, where the allocator would have to decide, than its
shallow traces say.  The first rows are those of a plan that decides every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.simulate.plan.candidates import Request, candidates
from repro.simulate.plan.planner import Planner
from repro.simulate.plan.rows import FULL, OK, OOM, STATES, PlanRow, order
from repro.util.garbage import uncollected
from repro.util.workers import Workers

CONFIRMED = 3
"""So many of the first rows are traced in full."""
COMPARED = 12
"""So many of the first rows are compared in all draws of what is not known, though fewer are shown: any of them may be
the fastest."""
AHEAD = 2
"""Times as many rows as are asked for are decided at once, so that workers have enough to do."""


@dataclass
class Plan:
    """All layouts, best first."""

    rows: list[PlanRow]
    traces: int
    """That were made."""
    no_time: str
    """Why rows have no times; empty if they do."""


@uncollected()
def plan(request: Request, workers: Workers, shown: int = 0, *, whole: bool = True) -> Plan:
    """All sensible layouts, best first, the first that are `shown`, and `COMPARED` at least, with intervals.

    `whole`: the others are timed as well; else they stay open if they cannot be among the first.  `shown` = 0: no
    intervals.  Raises `ConfigError` if there are no layouts.
    """
    compared = max(shown, COMPARED) if shown else 0
    layouts = candidates(request)
    if request.system.device.peak_flops:
        precision = layouts[0].precision
        try:
            request.system.peak(precision)
        except ConfigError as error:
            raise error.about("precision") from None
    planner = Planner(request, workers)
    rows = planner.estimated(layouts)
    rows += planner.estimated(_partitioned(request, rows))
    planner.open(rows)
    while True:
        if planner.no_time:
            for row in rows:
                row.time, row.least_s = {}, 0.0
            planner.send([row for row in rows if row.outcome == OK])
        rows.sort(key=order)
        if some := _undecided(rows, len(rows) if whole else compared):
            made = planner.decide(some)
        else:
            first = [row for row in rows[:CONFIRMED] if row.outcome == OK and row.evidence != FULL]
            if not first:
                break
            made = planner.full(first)
        # What turns out to be slower, or not to fit, changes which come first.
        decided = {row.layout: row for row in made}
        rows = [decided.get(row.layout, row) for row in rows]
        more = planner.estimated(_partitioned(request, made))
        planner.open(more)
        rows += more
    planner.send(rows if whole else rows[:compared])
    planner.intervals([row for row in rows[:compared] if row.outcome == OK and row.time])
    return Plan(rows, planner.traces, planner.no_time)


def _undecided(rows: Sequence[PlanRow], wanted: int) -> list[PlanRow]:
    """Of `rows`, best first, those that are open and may be among the first that are `wanted`; the next few."""
    fits = [row for row in rows if row.outcome == OK]
    open_ones = [row for row in fits if row.open]
    known = [row.seconds for row in fits if not row.open]
    if len(known) >= wanted:
        open_ones = [row for row in open_ones if row.seconds <= known[wanted - 1]]
    return open_ones[: AHEAD * wanted]


def _partitioned(request: Request, rows: Iterable[PlanRow]) -> list[Layout]:
    """With P_a, what does not fit without it for other reasons than its model states."""
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
