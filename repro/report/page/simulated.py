"""What was simulated, as a table of its own: nothing in it is a measurement."""

from __future__ import annotations

from typing import Any

from repro.render import units, words
from repro.report.page.measured import Record, identity
from repro.report.verdicts import anchor


def experiment_row(record: Record) -> dict[str, Any]:
    """One line of the table of simulated experiments, every number as text."""
    metrics, experiment = record["metrics"], record["experiment"]
    values = experiment["layout"]
    fullest: Record = max(record["roles"], key=lambda role: role["peak"]["total"], default={})
    return {
        "name": record["name"],
        "suite": record["suite"],
        "anchor": anchor("simulated", f"{record['suite']}/{record['name']}"),
        "model": experiment["model"]["name"],
        "system": experiment["system"],
        "ranks": f"{values['dp'] * values['tp'] * values.get('pp', 1):,}",
        "layout": f"{words.layout(values)}, micro-batch {values['micro_batch']}",
        "outcome": record["outcome"],
        "reason": units.readable(record.get("reason", "")),
        "states": units.size(metrics.get("memory.states_bytes")),
        "peak": units.size(metrics.get("memory.peak_bytes")),
        "where": _where(fullest),
        "reserved": units.size(metrics.get("memory.reserved_bytes")),
        "limit": units.size(metrics.get("memory.limit_bytes")),
        "sent": units.size(metrics.get("comm.sent_bytes")),
        "between": units.size(metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None),
        **identity(record),
    }


def _where(role: Record) -> str:
    """Where in the step the fullest rank holds most: `backward, first stage`."""
    if not role:
        return ""
    stage = "" if role["name"] == "all" else f", {role['name']} stage"
    return f"{role['peak_phase']}{stage}"
