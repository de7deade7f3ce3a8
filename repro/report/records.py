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
            found = {"records": len(members), "first": written[0], "last": written[-1]}
            entry = {**describe_origin(provenance), **found, "provenance": provenance}
            entries.append((newest.order, origin, entry))
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


SIZES = {"states_gb": "memory.states_bytes", "peak_gb": "memory.peak_bytes", "sent_gb": "comm.sent_bytes"}
"""Metric of each column in GB."""


def record_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one row of the table of experiments: its columns, and `facts`, further values as text by their labels."""
    metrics, layout, basis = record.metrics, record.experiment.layout, basis_of_record(record)
    is_simulated = record.evidence == SIMULATED
    facts = _simulated_facts(record, basis) if is_simulated else _measured_facts(record)
    common = {"Reason": units.readable(record.reason), "Suite": record.suite, "Record": record.id}
    return {
        "anchor": anchor(record.evidence, record.label),
        "name": record.name,
        "suite": record.suite,
        "evidence": record.evidence,
        "model": record.experiment.model.name,
        "layout": f"{words.describe_layout(layout)}, micro-batch {layout.micro_batch}",
        "outcome": record.outcome,
        "step_s": None if is_simulated and not basis else _rounded(metrics.get(STEP_SECONDS)),
        **{name: _rounded(metrics.get(key), 1e9) for name, key in SIZES.items()},
        "facts": {**facts, **common, "Written (UTC)": record.written[:16].replace("T", " ")},
    }


def _rounded(value: float | None, unit: float = 1.0) -> float | None:
    return None if value is None else float(f"{value / unit:.4g}")


def _measured_facts(record: ExperimentRecord) -> dict[str, str]:
    metrics = record.metrics
    ends = [units.seconds(metrics.get(f"step_seconds.p{part}")) for part in (20, 80)]
    outside = metrics.get("memory.context_bytes")
    return {
        "Step time, 20 % to 80 % of steps": " to ".join(ends) if STEP_SECONDS in metrics else "",
        "Tokens per second": units.number(metrics.get("tokens_per_s")),
        "Resident memory of the process": units.size(metrics.get("memory.rss_peak_bytes")),
        "GPU memory outside of torch": "" if outside is None else units.size(outside),
        "Last loss": f"{metrics['loss.last']:.4f}" if "loss.last" in metrics else units.NO_VALUE,
        "Engine": record.experiment.engine,
    }


def _simulated_facts(record: ExperimentRecord, basis: str) -> dict[str, str]:
    metrics, layout = record.metrics, record.experiment.layout
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    sent = metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None
    return {
        "Step time rests on": basis,
        "Peak memory in": _peak_place(fullest),
        "Reserved memory": units.size(metrics.get("memory.reserved_bytes")),
        "Memory limit": units.size(metrics.get("memory.limit_bytes")),
        "Sent between nodes": units.size(sent),
        "System": f"{units.number(layout.world)} x {record.experiment.system}",
    }


def _peak_place(role: SimulatedRole | None) -> str:
    """Return the phase and stage of the fullest rank's memory peak, such as `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
