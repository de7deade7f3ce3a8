"""Lines of the page's tables of records, measured apart from simulated, every number as text."""

from __future__ import annotations

from typing import Any

from repro.config import words
from repro.report.verdicts import anchor
from repro.results.metrics import STEP_SECONDS
from repro.results.record_parts import SimulatedRole
from repro.results.schema import MEASURED, SIMULATED, ExperimentRecord, Record
from repro.simulate.time.calibration import basis_of_record
from repro.util import units


def measured_row(record: ExperimentRecord) -> dict[str, Any]:
    """One line of the table of experiments, every number as text."""
    metrics, experiment = record.metrics, record.experiment

    def of(name: str) -> float | None:
        return metrics.get(name)

    spread = ""
    if of(STEP_SECONDS) is not None:
        spread = f"[{units.seconds(of('step_seconds.p20'))}, {units.seconds(of('step_seconds.p80'))}]"
    beside = of("memory.context_bytes")
    return {
        "name": record.name,
        "suite": record.suite,
        "anchor": anchor(MEASURED, record.at),
        "model": experiment.model.name,
        "engine": experiment.engine,
        "layout": words.layout(experiment.layout),
        "outcome": record.outcome,
        "reason": record.reason,
        "step": units.seconds(of(STEP_SECONDS)),
        "spread": spread,
        "tokens_per_s": units.number(of("tokens_per_s")),
        "states": units.size(of("memory.states_bytes")),
        "peak": units.size(of("memory.peak_bytes")),
        "resident": units.size(of("memory.rss_peak_bytes")),
        "of_gpu": "" if beside is None else f"{units.size(beside)} of its GPU",
        "sent": units.size(of("comm.sent_bytes")),
        "loss": f"{metrics['loss.last']:.4f}" if "loss.last" in metrics else units.NOTHING,
        **identity(record),
    }


def identity(record: Record) -> dict[str, str]:
    """Which record it is, and when it was written (UTC)."""
    return {"id": record.id, "written": record.written[:16].replace("T", " ")}


def simulated_row(record: ExperimentRecord) -> dict[str, Any]:
    """One line of the table of simulated experiments, every number as text."""
    metrics, experiment = record.metrics, record.experiment
    values, basis = experiment.layout, basis_of_record(record)
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    return {
        "name": record.name,
        "suite": record.suite,
        "anchor": anchor(SIMULATED, record.at),
        "model": experiment.model.name,
        "system": experiment.system,
        "ranks": units.number(values.world),
        "layout": f"{words.layout(values)}, micro-batch {values.micro_batch}",
        "outcome": record.outcome,
        "reason": units.readable(record.reason),
        "step": units.seconds(metrics.get(STEP_SECONDS)) if basis else units.NOTHING,
        "rests_on": basis,
        "states": units.size(metrics.get("memory.states_bytes")),
        "peak": units.size(metrics.get("memory.peak_bytes")),
        "where": _where(fullest),
        "reserved": units.size(metrics.get("memory.reserved_bytes")),
        "limit": units.size(metrics.get("memory.limit_bytes")),
        "sent": units.size(metrics.get("comm.sent_bytes")),
        "between": units.size(metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None),
        **identity(record),
    }


def _where(role: SimulatedRole | None) -> str:
    """Where in the step the fullest rank holds most: `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
