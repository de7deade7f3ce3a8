"""A scheduled step as a Chrome trace: open it at ui.perfetto.dev or chrome://tracing.

One process for each pipeline stage that stands for a role, one row for each of its streams.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.simulate.time.stage import Span

MICROSECONDS = 1e6


def events(spans: Sequence[Span], stages: Collection[int]) -> list[dict[str, Any]]:
    """Trace events of `stages`, times from the beginning of the step in microseconds."""
    shown = [span for span in spans if span.stage in stages]
    began = min((span.start for span in shown), default=0.0)
    rows: dict[tuple[int, str], int] = {}
    found: list[dict[str, Any]] = []
    for stage in sorted(stages):
        found.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}})
    for span in shown:
        key = (span.stage, span.stream)
        if key not in rows:
            rows[key] = len([row for row in rows if row[0] == span.stage])
            name = {"name": span.stream}
            found.append(
                {"ph": "M", "pid": span.stage, "tid": rows[key], "name": "thread_name", "args": name}
            )
        found.append(
            {
                "ph": "X",
                "pid": span.stage,
                "tid": rows[key],
                "name": span.name,
                "ts": (span.start - began) * MICROSECONDS,
                "dur": span.seconds * MICROSECONDS,
            }
        )
    return found


def write(path: Path, spans: Sequence[Span], stages: Collection[int]) -> None:
    """Write the trace of `stages`.  Raises `ConfigError` if the file cannot be written."""
    document = {"displayTimeUnit": "ms", "traceEvents": events(spans, stages)}
    try:
        path.write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        what = f"a file that can be written ({error.strerror})"
        raise ConfigError("timeline", str(path), what) from None
