"""What was simulated, as a table of its own: nothing in it is a measurement."""

from __future__ import annotations

from typing import Any

from repro.render import units, words
from repro.report.page.measured import identity
from repro.report.verdicts import anchor
from repro.results.schema import SIMULATED, ExperimentRecord, Role


def experiment_row(record: ExperimentRecord) -> dict[str, Any]:
    """One line of the table of simulated experiments, every number as text."""
    metrics, experiment = record.metrics, record.experiment
    values = experiment.layout
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    return {
        "name": record.name,
        "suite": record.suite,
        "anchor": anchor(SIMULATED, record.at),
        "model": experiment.model.name,
        "system": experiment.system,
        "ranks": f"{values.world:,}",
        "layout": f"{words.layout(values)}, micro-batch {values.micro_batch}",
        "outcome": record.outcome,
        "reason": units.readable(record.reason),
        "states": units.size(metrics.get("memory.states_bytes")),
        "peak": units.size(metrics.get("memory.peak_bytes")),
        "where": _where(fullest),
        "reserved": units.size(metrics.get("memory.reserved_bytes")),
        "limit": units.size(metrics.get("memory.limit_bytes")),
        "sent": units.size(metrics.get("comm.sent_bytes")),
        "between": units.size(metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None),
        **identity(record),
    }


def _where(role: Role | None) -> str:
    """Where in the step the fullest rank holds most: `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
