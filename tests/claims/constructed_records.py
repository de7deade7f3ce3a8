"""Constructed records of experiments that did not run, for the tests of the judge."""

from __future__ import annotations

from repro.results.schema import ExperimentRecord
from tests.records import made_up


def record(
    name: str, *, written: str = "2026-01-01T00:00:00Z", outcome: str = "ok", **metrics: float
) -> ExperimentRecord:
    """Return a record of an experiment with `metrics`; a name without a suite belongs to suite s."""
    suite, _, name = name.rpartition("/")
    reason = "" if outcome == "ok" else "rank 1 ran out of memory"
    return made_up(name, suite=suite or "s", written=written, outcome=outcome, reason=reason, metrics=metrics)
