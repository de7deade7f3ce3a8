"""Rows of the site's table of experiments, and the origins of records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from repro.config import words
from repro.report.verdicts import anchor
from repro.results.metrics import STEP_SECONDS
from repro.results.record_parts import Provenance, SimulatedRole
from repro.results.schema import SIMULATED, ExperimentRecord, Record
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


NUMBERS = {
    "step_s": "step time (s)",
    "states_gb": "model states (GB)",
    "peak_gb": "peak memory (GB)",
    "sent_gb": "sent per step (GB)",
}
"""Headers of the columns with numbers, by key of a row."""
FACT_LABELS = {
    "outcome": "outcome",
    "reason": "reason",
    "model": "model",
    "engine": "engine",
    "layout": "layout",
    "system": "system",
    "spread": "step time, 20 % to 80 % of all steps",
    "rests_on": "step time rests on",
    "tokens_per_s": "tokens per second",
    "where": "peak memory in",
    "reserved": "reserved by the allocator",
    "limit": "memory limit",
    "resident": "resident memory of the process",
    "of_gpu": "GPU memory outside of torch",
    "between": "sent between nodes per step",
    "loss": "last loss",
    "written": "written (UTC)",
    "id": "record",
}
"""Labels of the texts of a record, by key of a row."""


def record_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one row of the table of experiments: `NUMBERS` as numbers, `FACT_LABELS` as text."""
    metrics, experiment, layout = record.metrics, record.experiment, record.experiment.layout
    is_simulated, basis = record.evidence == SIMULATED, basis_of_record(record)
    sizes = ("memory.states_bytes", "memory.peak_bytes", "comm.sent_bytes")
    values = [metrics.get(STEP_SECONDS) if basis or not is_simulated else None]
    values += [None if metrics.get(key) is None else metrics[key] / 1e9 for key in sizes]
    row = {
        "anchor": anchor(record.evidence, record.label),
        "name": record.name,
        "suite": record.suite,
        "evidence": record.evidence,
        **{key: None if x is None else float(f"{x:.4g}") for key, x in zip(NUMBERS, values, strict=True)},
        "outcome": record.outcome,
        "reason": units.readable(record.reason),
        "model": experiment.model.name,
        "engine": experiment.engine,
        "layout": f"{words.describe_layout(layout)}, micro-batch {layout.micro_batch}",
        **record_identity(record),
    }
    return row | (_simulated_facts(record, basis) if is_simulated else _measured_facts(record))


def _measured_facts(record: ExperimentRecord) -> dict[str, str]:
    metrics = record.metrics
    ends = [units.seconds(metrics.get(f"step_seconds.p{part}")) for part in (20, 80)]
    beside = metrics.get("memory.context_bytes")
    return {
        "spread": " to ".join(ends) if STEP_SECONDS in metrics else "",
        "tokens_per_s": units.number(metrics.get("tokens_per_s")),
        "resident": units.size(metrics.get("memory.rss_peak_bytes")),
        "of_gpu": "" if beside is None else units.size(beside),
        "loss": f"{metrics['loss.last']:.4f}" if "loss.last" in metrics else units.NO_VALUE,
    }


def _simulated_facts(record: ExperimentRecord, basis: str) -> dict[str, str]:
    metrics = record.metrics
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    return {
        "system": f"{units.number(record.experiment.layout.world)} x {record.experiment.system}",
        "rests_on": basis,
        "where": _peak_place(fullest),
        "reserved": units.size(metrics.get("memory.reserved_bytes")),
        "limit": units.size(metrics.get("memory.limit_bytes")),
        "between": units.size(metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None),
    }


def record_identity(record: Record) -> dict[str, str]:
    """Return the record's id and its time of writing (UTC)."""
    return {"id": record.id, "written": record.written[:16].replace("T", " ")}


def _peak_place(role: SimulatedRole | None) -> str:
    """Return the phase and stage of the fullest rank's memory peak, such as `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
