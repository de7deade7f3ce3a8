"""`repro schedule`: a pipeline schedule, drawn or as data."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from repro.config.errors import require
from repro.report.text.schedule_plan import TimedSchedule, describe, make, number, share
from repro.report.text.schedule_text import show
from repro.util import files


def command(
    stages: int,
    micro_batches: int,
    chunks: int,
    name: str,
    forward: str,
    backward: str,
    json: bool,
    svg: bool,
    out: Path | None,
) -> int:
    """Print, draw or dump one schedule.  Raises `ConfigError`, naming the option that is wrong."""
    svg = svg or out is not None
    require(not (json and svg), "--json", True, "left out with --svg or --out: one document at a time")
    plan = make(name, stages, micro_batches, chunks, forward, backward)
    if json:
        document = json_module.dumps(describe(plan), separators=(",", ":"))
        sys.stdout.write(document + "\n")
    elif svg:
        if out is None:
            sys.stdout.write(_svg(plan))
        else:
            files.write(out, _svg(plan))
            print(out)
    else:
        show(plan)
    return 0


def _svg(plan: TimedSchedule) -> str:
    """The picture as an SVG document."""
    from repro.report.figures import schedule_drawing, style

    facts = "No bubble"
    if plan.bubble:
        idle = number(plan.total - plan.ideal)
        facts = (
            f"Bubble {share(plan.bubble)} of the ideal time {number(plan.ideal)}, {plan.formula}: {idle} idle"
        )
    facts += f"; a micro-batch takes {number(plan.forward)} forward and {number(plan.backward)} backward on a stage"
    with style.look():
        figure = schedule_drawing.picture(plan.slots, plan.title, facts)
        return style.svg(style.Drawing("schedule", plan.title, facts, (), figure=figure)) + "\n"
