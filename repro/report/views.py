"""Claims, records and origins of records as dictionaries of text for the HTML templates of the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from repro.claims import verdicts
from repro.claims.headlines import describe_strength
from repro.claims.ledger import CERTAINTIES, ITSELF, KINDS, PUBLISHED_SCALE
from repro.claims.published import append_unit
from repro.claims.run_commands import device_commands, evaluation_commands, experiments_of
from repro.claims.table import count_text, why
from repro.config import words
from repro.results.metrics import STEP_SECONDS
from repro.results.record_parts import Provenance, SimulatedRole
from repro.results.schema import SIMULATED, ExperimentRecord, Record
from repro.simulate.time.calibration import basis_of_record
from repro.util import units

if TYPE_CHECKING:
    from repro.claims.ledger import Claim, Ledger
    from repro.claims.run_commands import SuiteCatalogue
    from repro.claims.verdicts import ClaimResult, Finding, InputUncertainty, RowResult

VERDICT_SIGNS = {
    verdicts.REPRODUCED: "✓",
    verdicts.POSSIBLE: "?",
    verdicts.NOT_REPRODUCED: "✗",
    verdicts.FOLLOWS: "≈",
    verdicts.INCONSISTENT: "≉",
    verdicts.NOT_COMPARABLE: "≠",
    verdicts.NOT_RUN: "○",
    verdicts.NO_TEST: "∅",
    verdicts.DEPENDS: "±",
    verdicts.ERRATUM: "!",
}
"""Character in front of each verdict of a claim in the report, which distinguishes verdicts without colour."""


def anchor(kind: str, name: str) -> str:
    """Return the HTML anchor of the record `suite/name` on the report's page of experiments."""
    return f"{'sim' if kind == 'simulated' else 'run'}-{name.replace('/', '.').replace(' ', '-')}"


def claim_view(result: ClaimResult, ledger: Ledger, catalogue: SuiteCatalogue) -> dict[str, Any]:
    """Return the values for the HTML template of a claim's page in the report."""
    claim = result.claim
    read = list(dict.fromkeys([*experiments_of(claim.rows), *_measured_at_published_scale(result)]))
    return {
        **vars(claim),
        **vars(result),
        "sources": [_source(text, ledger) for text in claim.source],
        "certainty_meaning": CERTAINTIES[claim.certainty],
        "predicted": claim.prediction,
        "kinds": [kind.kind for kind in result.kinds if kind.decided and kind.kind in KINDS] or ["none"],
        "why": why(result),
        "cells": {kind: _cell(result, kind) for kind in (*KINDS, ITSELF)},
        "rows": [row_view(row, claim) for row in result.rows],
        "experiments": [{"name": name, "kind": kind, "anchor": anchor(kind, name)} for kind, name in read],
        "commands": [*catalogue.commands(read), *evaluation_commands(claim), *device_commands(claim)],
    }


def _measured_at_published_scale(result: ClaimResult) -> list[tuple[str, str]]:
    """Return kind and name of a claim's experiments that were measured at the published scale."""
    return [
        (finding.kind, name)
        for row in result.rows
        for finding in row.findings
        if finding.kind == "measured" and finding.scale == PUBLISHED_SCALE
        for name in finding.experiments
    ]


def _cell(result: ClaimResult, name: str) -> dict[str, str]:
    """Return a claim's cell for one kind of evidence: value (or count of reproduced ones), scale of runs, verdict."""
    words = count_text(result, name)
    kind = result.kind(name)
    if kind is None or kind.decided == 0:
        return {"text": words, "scale": "", "verdict": ""}
    values = [(f, row) for row in result.rows if row.row.main for f in row.under(name)]
    if len(values) == 1 and name != ITSELF:
        words = _value(*values[0])
    elif kind.decided < kind.rows:
        words += f" ({kind.rows - kind.decided} not run)"
    shown = kind.verdict
    # The kind's verdict is NOT_RUN if any published value has no run. Show the verdict on the other values instead.
    if shown == verdicts.NOT_RUN:
        shown = verdicts.REPRODUCED if kind.reproduced == kind.decided else verdicts.POSSIBLE
    return {"text": words, "scale": kind.scale, "verdict": shown}


def row_view(result: RowResult, claim: Claim) -> dict[str, Any]:
    """Return one published value with all its evidence, strongest first, as text for the HTML page of its claim."""
    row = result.row
    published = f"{row.bound} {row.published}".strip()
    if row.printed is not None:
        published = append_unit(published, row.unit)
    return {
        "label": row.label,
        "published": published + (f" ± {row.error:g}" if row.error else ""),
        **{key: getattr(row, key) for key in ("certainty", "note", "given", "main")},
        "verdict": result.verdict,
        "reason": "" if result.reason == claim.needs or result.findings else result.reason,
        "is_weak": bool(result.weakness),
        "strength": describe_strength(result),
        "blind": append_unit(row.blind.text, row.unit) if row.blind else "",
        "findings": [_finding(finding, result) for finding in result.findings],
    }


def _finding(finding: Finding, result: RowResult) -> dict[str, Any]:
    at_scale = finding.decided and isinstance(finding.expected, int | float)
    return {
        **{key: getattr(finding, key) for key in ("kind", "origin", "itself", "expression", "verdict")},
        "scale": finding.scale_label,
        "machine": finding.machine if finding.decided else "",
        "value": "not run" if finding.value is None else _value(finding, result),
        "number": "" if finding.value is None else f"{finding.value}",
        "tolerance": finding.reason if at_scale else finding.tolerance,
        "reason": "" if at_scale else _beside_the_rule(finding),
        "disagrees": finding in result.disagrees,
        "tornado": tornado(finding.uncertainty) if finding.uncertainty is not None else [],
    }


MAX_TORNADO_BARS = 5
"""Maximum number of uncertain inputs in a tornado diagram; inputs with the largest effects are shown."""


def tornado(value: InputUncertainty) -> list[dict[str, Any]]:
    """Return a tornado diagram's bars: for each uncertain input, the predicted values if only this input varies.

    `left`, `width` and `best` are percentages of the common axis of all bars. `best` is the position of the value with
    the best estimates of all inputs.
    """
    shown = value.largest_unknowns(MAX_TORNADO_BARS)
    ends = [end for _, low, high, _ in shown for end in (low, high)] + [value.best]
    start, span = min(ends), (max(ends) - min(ends)) or 1.0

    def place(end: float) -> float:
        return round(100 * (end - start) / span, 1)

    return [
        {
            "key": key,
            "least": units.number(min(low, high)),
            "most": units.number(max(low, high)),
            "ends": f"prediction {units.number(low)} at the low end of the input, {units.number(high)} at its high end",
            "left": place(min(low, high, value.best)),
            "width": round(place(max(low, high, value.best)) - place(min(low, high, value.best)), 1),
            "best": place(value.best),
            "share": units.percent(share),
        }
        for key, low, high, share in shown
    ]


def _beside_the_rule(finding: Finding) -> str:
    """Return the reason of a verdict on a piece of evidence without the tolerance, which the page shows separately."""
    rule = finding.tolerance.partition(": ")[2]
    return finding.reason.removeprefix(rule).removeprefix("; ") if rule else finding.reason


def _value(finding: Finding, result: RowResult) -> str:
    """Return the value of a piece of evidence as text, with the unit of the published value if it is a number."""
    return finding.text if isinstance(finding.value, str) else append_unit(finding.text, result.row.unit)


def _source(text: str, ledger: Ledger) -> dict[str, str]:
    """Return a citation such as `KEY sec. 3`, and the title and address of its source."""
    key = text.split(" ")[0]
    source = ledger.sources.get(key)
    return {"text": text, "title": f"{source.title}; {source.where}" if source else ""}


def count_verdicts(claims: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of claims with each verdict, without verdicts that no claim has."""
    found = [claim["verdict"] for claim in claims]
    return {verdict: found.count(verdict) for verdict in VERDICT_SIGNS if verdict in found}


class Machines:
    """Origins of records: one entry per combination of machine, commit and package versions, numbered from 1."""

    def __init__(self, records: Iterable[Record]):
        groups: dict[tuple[str, ...], list[Record]] = {}
        for record in sorted(records, key=lambda record: record.order, reverse=True):
            groups.setdefault(_origin(record), []).append(record)
        self._numbers = {origin: number for number, origin in enumerate(groups, 1)}
        self.entries: list[dict[str, Any]] = []
        """Texts about each origin of records (machine, commit and versions), the origin of the newest record first."""
        for origin, members in groups.items():
            written = sorted(record.written[:19].replace("T", " ") for record in members)
            found = {"records": len(members), "first": written[0], "last": written[-1]}
            provenance = members[0].provenance
            number = {"number": self._numbers[origin]}
            self.entries.append(number | describe_origin(provenance) | found | {"provenance": provenance})

    def number(self, record: Record) -> int:
        """Return the number, from 1, of the combination of machine, commit and versions that produced `record`."""
        return self._numbers[_origin(record)]


def _origin(record: Record) -> tuple[str, ...]:
    return tuple(describe_origin(record.provenance).values())


def describe_origin(provenance: Provenance) -> dict[str, str]:
    """Return machine, versions and commit of a record as short texts by name; an unknown value is `unknown`."""
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
    """Return the git commit of a record: its first 12 digits, with the hash of uncommitted changes if there are any."""
    git = provenance.get("git") or {}
    if not git.get("commit"):
        return "not a checkout" if not git else f"no commit, tree {git.get('diff')}"
    return git["commit"][:12] + (f" + changes {git['diff']}" if git.get("dirty") else "")


SIZES = {"states_gb": "memory.states_bytes", "peak_gb": "memory.peak_bytes", "sent_gb": "comm.sent_bytes"}
"""Metrics (in bytes) of the memory and traffic columns (in GB) of the report's table of experiments, by column."""


def record_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one row of the report's table of experiments; its entry `facts` has further values as text, by label."""
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
        "Step time, 20th to 80th percentile": " to ".join(ends) if STEP_SECONDS in metrics else "",
        "Tokens per second": units.number(metrics.get("tokens_per_s")),
        "Resident memory of the process": units.size(metrics.get("memory.rss_peak_bytes")),
        "GPU memory outside torch's allocator": "" if outside is None else units.size(outside),
        "Last loss": f"{metrics['loss.last']:.4f}" if "loss.last" in metrics else units.NO_VALUE,
        "Engine": record.experiment.engine,
    }


def _simulated_facts(record: ExperimentRecord, basis: str) -> dict[str, str]:
    metrics, layout = record.metrics, record.experiment.layout
    fullest = max(record.roles or (), key=lambda role: role.peak["total"], default=None)
    sent = metrics.get("comm.link.inter-node.sent_bytes", 0) if metrics else None
    return {
        "Basis of the step time": basis,
        "Peak memory in": _peak_place(fullest),
        "Reserved memory": units.size(metrics.get("memory.reserved_bytes")),
        "Memory limit": units.size(metrics.get("memory.limit_bytes")),
        "Sent between nodes": units.size(sent),
        "System": f"{units.number(layout.world)} x {record.experiment.system}",
    }


def _peak_place(role: SimulatedRole | None) -> str:
    """Return phase and pipeline stage of a simulated memory peak, such as `backward, first stage`."""
    if role is None:
        return ""
    stage = "" if role.name == "all" else f", {role.name} stage"
    return f"{role.peak_phase}{stage}"
