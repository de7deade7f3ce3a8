"""Live bytes by category over one step of a role, short enough for a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from repro.config.enums import ACCOUNTED, Category
from repro.simulate.memory.live import LiveBytes
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import Trace

POINTS = 96
STEPS = 10_000
"""A record keeps bytes in whole parts of this many of the device's peak."""


def over_step(traced: Trace, seconds: Callable[[Operator], float]) -> dict[str, Any]:
    """What is live in `POINTS` equal parts of the device's busy time, of each the moment that holds most.

    `seconds` of an operator on the device; messages take none here.  The result has `unit` (bytes), `bytes` by
    category in units (one number where it never changes; categories that hold nothing are left out), and `phases`:
    the part in which each begins, its name and micro-batch, the first of each part.  The largest sum is the
    role's peak, unless initialisation held more.
    """
    step = traced.events[traced.step_start : traced.step_stop]
    whole = sum(seconds(event) for event in step if isinstance(event, Operator))
    live = LiveBytes()
    found: list[dict[str, int]] = []
    phases: dict[int, tuple[str, int]] = {}
    most, spent = -1, 0.0

    def seen() -> None:
        """Keep this moment if it holds more than the others of its part."""
        nonlocal most
        part = min(POINTS - 1, int(spent / whole * POINTS)) if whole else 0
        while len(found) <= part:
            found.append(dict(live.now))
            most = live.total
        if live.total > most:
            found[-1], most = dict(live.now), live.total

    for number, event in enumerate(traced.events[: traced.step_stop]):
        live.see(event)
        if number < traced.step_start:
            continue
        if isinstance(event, Operator):
            spent += seconds(event)
        elif isinstance(event, PhaseStart):
            phases.setdefault(min(POINTS - 1, len(found)), (event.name, event.micro_batch))
        seen()
    unit = max(1, max(sum(point.values()) - point[Category.HOST] for point in found) // STEPS)
    scaled = {
        category: [round(point[category] / unit) for point in found]
        for category in ACCOUNTED
        if any(point[category] for point in found)
    }
    return {
        "unit": unit,
        "bytes": {key: row[:1] if len(set(row)) == 1 else row for key, row in scaled.items()},
        "phases": [[part, name, micro_batch] for part, (name, micro_batch) in phases.items()],
    }
