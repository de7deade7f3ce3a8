"""Text of records: their origins, and the rows of the page's tables, with every number as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from repro.config import words
from repro.report.verdicts import anchor
from repro.results.metrics import STEP_SECONDS
from repro.results.record_parts import Provenance, SimulatedRole
from repro.results.schema import MEASURED, SIMULATED, ExperimentRecord, Record
from repro.simulate.time.calibration import basis_of_record
from repro.util import units


class Machines:
    """Origins of records: one entry per machine, source state and set of versions, numbered from 1."""

    def __init__(self, records: Iterable[Record]):
        groups: dict[tuple[str, ...], list[Record]] = {}
        for record in records:
            groups.setdefault(_origin(record), []).append(record)
        entries = []
        for origin, members in groups.items():
            written = sorted(record.written[:19].replace("T", " ") for record in members)
            newest = max(members, key=lambda record: record.order)
            provenance = newest.provenance
            found = {
                "records": len(members),
                "first": written[0],
                "last": written[-1],
                "provenance": provenance,
            }
            entries.append((newest.order, origin, {**describe_origin(provenance), **found}))
        entries.sort(key=lambda entry: entry[0], reverse=True)
        self.entries = [{"number": number, **entry} for number, (_, _, entry) in enumerate(entries, 1)]
        """Newest first."""
        self._numbers = {origin: number for number, (_, origin, _) in enumerate(entries, 1)}

    def number(self, record: Record) -> int:
        """Return the number of the entry with the origin of `record`."""
        return self._numbers[_origin(record)]


def _origin(record: Record) -> tuple[str, ...]:
    return tuple(describe_origin(record.provenance).values())


def describe_origin(provenance: Provenance) -> dict[str, str]:
    """Return a record's machine, versions and source, each in a few words; `unknown` without a value."""
    cpu, packages = provenance.get("cpu") or {}, provenance.get("packages") or {}
    memory, gpus = provenance.get("memory") or {}, provenance.get("gpus") or []
    names = [str(gpu.get("name")) for gpu in gpus]
    kinds = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return {
        "host": str(provenance.get("host", "unknown")),
        "cpu": f"{cpu.get('model', 'unknown')}, {cpu.get('usable_cores', '?')} cores",
        "memory": units.size(memory.get("total_bytes")),
        "gpus": ", ".join(kinds) or "none",
        "torch": str(packages.get("torch", "unknown")),
        "python": str((provenance.get("python") or {}).get("version", "unknown")),
        "commit": _commit(provenance),
    }


def _commit(provenance: Provenance) -> str:
    """Return the commit, such as `3300ebc0a1b2`, with the hash of the uncommitted difference if there is one."""
    git = provenance.get("git") or {}
    if not git.get("commit"):
        return "not a checkout" if not git else f"no commit, tree {git.get('diff')}"
    return git["commit"][:12] + (f" + changes {git['diff']}" if git.get("dirty") else "")


def measured_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one row of the table of experiments, with every number as text."""
    metrics, experiment = record.metrics, record.experiment

    spread = ""
    if metrics.get(STEP_SECONDS) is not None:
        spread = f"[{units.seconds(metrics.get('step_seconds.p20'))}, {units.seconds(metrics.get('step_seconds.p80'))}]"
    beside = metrics.get("memory.context_bytes")
    return {
        "name": record.name,
        "suite": record.suite,
        "anchor": anchor(MEASURED, record.label),
        "model": experiment.model.name,
        "engine": experiment.engine,
        "layout": words.describe_layout(experiment.layout),
        "outcome": record.outcome,
        "reason": record.reason,
        "step": units.seconds(metrics.get(STEP_SECONDS)),
        "spread": spread,
        "tokens_per_s": units.number(metrics.get("tokens_per_s")),
        "states": units.size(metrics.get("memory.states_bytes")),
        "peak": units.size(metrics.get("memory.peak_bytes")),
        "resident": units.size(metrics.get("memory.rss_peak_bytes")),
        "of_gpu": "" if beside is None else f"{units.size(beside)} of its GPU",
        "sent": units.size(metrics.get("comm.sent_bytes")),
        "loss": f"{metrics['loss.last']:.4f}" if "loss.last" in metrics else units.NO_VALUE,
        **record_identity(record),
    }


def record_identity(record: Record) -> dict[str, str]:
    """Return the record's id and its time of writing (UTC)."""
    return {"id": record.id, "written": record.written[:16].replace("T", " ")}


def simulated_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one row of the table of simulated experiments, with every number as text."""
    metrics, experiment = record.metrics, record.experiment
    values, basis = experiment.layout, basis_of_record(record)
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    return {
        "name": record.name,
        "suite": record.suite,
        "anchor": anchor(SIMULATED, record.label),
        "model": experiment.model.name,
        "system": experiment.system,
        "ranks": units.number(values.world),
        "layout": f"{words.describe_layout(values)}, micro-batch {values.micro_batch}",
        "outcome": record.outcome,
        "reason": units.readable(record.reason),
        "step": units.seconds(metrics.get(STEP_SECONDS)) if basis else units.NO_VALUE,
        "rests_on": basis,
        "states": units.size(metrics.get("memory.states_bytes")),
        "peak": units.size(metrics.get("memory.peak_bytes")),
        "where": _peak_place(fullest),
        "reserved": units.size(metrics.get("memory.reserved_bytes")),
        "limit": units.size(metrics.get("memory.limit_bytes")),
        "sent": units.size(metrics.get("comm.sent_bytes")),
        "between": units.size(metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None),
        **record_identity(record),
    }


def _peak_place(role: SimulatedRole | None) -> str:
    """Return the phase and stage of the fullest rank's memory peak, such as `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
