"""`repro schedule`: a pipeline schedule, drawn or as data."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from repro.cli.views.schedule_plan import describe, make
from repro.cli.views.schedule_svg import draw
from repro.cli.views.schedule_text import show
from repro.config.errors import require


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
            sys.stdout.write(draw(plan))
        else:
            out.write_text(draw(plan), encoding="utf-8")
            print(out)
    else:
        show(plan)
    return 0
