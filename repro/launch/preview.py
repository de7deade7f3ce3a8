"""Preview of `repro run`: experiments, their location and their last duration. Nothing is started or written.

The duration of a step on this machine comes from records alone, because its cores are not calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from repro.config import Experiment, words
from repro.config.suites import Entry, Suite
from repro.config.systems import LOCAL_SYSTEMS
from repro.config.systems import load_system_file as load_system
from repro.launch import plan, simulated
from repro.launch.local_capacity import DEVICES
from repro.launch.run import load_suites, missing_requirement
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.results.select import by_key
from repro.results.store import Store
from repro.simulate.plan.closed_form import stage_parameters, state_bytes
from repro.util import units

Durations: TypeAlias = dict[tuple[str, str], float]
"""Durations in seconds by suite and name."""
Traced: TypeAlias = dict[str, ExperimentRecord]
"""The newest simulation by key."""
TO_RUN, KNOWN, ELSEWHERE = "to run", "in the store", "not here"


@dataclass(frozen=True)
class ExperimentPreview:
    """Preview of one experiment."""

    suite: str
    name: str
    state: str
    """`TO_RUN`, `KNOWN` or `ELSEWHERE`."""
    where: str
    """Processes of the experiment, or its missing requirement."""
    steps: int
    """Number of training steps."""
    last_s: float | None
    """Duration of the newest record of this name, in seconds; None without a record."""
    limit_s: float
    """Timeout of the launch, in seconds; 0 disables it."""
    memory: str = ""
    """Memory per device of another system, and whether it fits; empty for the local machine."""


def preview_run(
    suites: Sequence[Path], only: list[str], results: Path, rerun: bool, evidence: str, system: str
) -> list[ExperimentPreview]:
    """Return a preview of every selected experiment, in the order of the files.  Raises `ConfigError`."""
    store = Store(results)
    found: list[ExperimentPreview] = []
    took = _last_durations(store, evidence)
    traced = by_key(store.records(), SIMULATED)
    for suite in load_suites(suites, evidence, system):
        entries = plan.select(suite, only)
        if evidence == SIMULATED:
            if system:
                entries = simulated.move_to_system(entries, system)
            found += _simulated(suite, entries, store, rerun, took, traced)
        else:
            found += _measured(suite, entries, store, rerun, took, traced)
    return found


def _measured(
    suite: Suite, entries: list[Entry], store: Store, rerun: bool, took: Durations, traced: Traced
) -> Iterable[ExperimentPreview]:
    without = {entry.experiment.name: missing_requirement(entry) for entry in entries}
    here = [entry for entry in entries if not without[entry.experiment.name]]
    todo = {e.name for task in plan.tasks(suite, here, store, rerun=rerun) for e in task.experiments}
    for entry in entries:
        name, limit_s = entry.experiment.name, entry.experiment.limits.timeout_s
        steps = entry.experiment.training.steps
        if without[name]:
            memory = _memory(entry.experiment, traced)
            yield ExperimentPreview(
                suite.name, name, ELSEWHERE, f"needs {without[name]}", steps, None, limit_s, memory
            )
        else:
            state, last_s = TO_RUN if name in todo else KNOWN, took.get((suite.name, name))
            yield ExperimentPreview(
                suite.name, name, state, _processes(entry.experiment), steps, last_s, limit_s
            )


def _processes(experiment: Experiment) -> str:
    what = "rank" if DEVICES[experiment.system] == "cpu" else "GPU"
    said = words.count_noun(experiment.layout.world, what)
    return f"{said} here, {experiment.network}" if experiment.network is not None else f"{said} here"


def _simulated(
    suite: Suite, entries: list[Entry], store: Store, rerun: bool, took: Durations, traced: Traced
) -> Iterable[ExperimentPreview]:
    without = {entry.experiment.name: simulated.needs(entry.experiment) for entry in entries}
    can = [entry for entry in entries if not without[entry.experiment.name]]
    on = {entry.experiment.name: simulated.system_of(entry.experiment) for entry in can}
    todo = {entry.experiment.name for entry in simulated.missing_entries(can, store, on, rerun)}
    for entry in entries:
        name, ranks = entry.experiment.name, entry.experiment.layout.world
        if without[name]:
            yield ExperimentPreview(suite.name, name, ELSEWHERE, f"needs {without[name]}", 1, None, 0.0)
        else:
            state = TO_RUN if name in todo else KNOWN
            where = f"{words.count_noun(ranks, 'rank')} of {entry.experiment.system}, traced here"
            memory, last_s = _memory(entry.experiment, traced), took.get((suite.name, name))
            yield ExperimentPreview(suite.name, name, state, where, 1, last_s, 0.0, memory)


def _memory(experiment: Experiment, traced: Traced) -> str:
    """Describe the traced memory of a device; without a trace, the model states in closed form as a lower bound."""
    if experiment.system in LOCAL_SYSTEMS:
        return ""
    system = load_system(experiment.system)
    known = system.device.memory_bytes.value is not None
    limit = system.allocatable_bytes() if known else None
    of = "of a size that is not published" if limit is None else f"of {units.size(limit)}"
    record = traced.get(experiment.key)
    if record is not None and "memory.peak_bytes" in record.metrics:
        held = record.metrics.get("memory.reserved_bytes", record.metrics["memory.peak_bytes"])
        fits = "" if limit is None else ": fits" if record.outcome == "ok" else ": does not fit"
        return f"{units.size(held)} {of}, traced{fits}"
    fullest = max(stage_parameters(experiment.model, experiment.layout).values())
    states = sum(state_bytes(fullest, experiment.layout).values())
    fits = "" if limit is None or states <= limit else ": does not fit"
    return f"states {units.size(states)} {of}{fits}"


def _last_durations(store: Store, evidence: str) -> Durations:
    """Return the durations of the newest records of one kind of evidence."""
    records = (r for r in store.records() if isinstance(r, ExperimentRecord) and r.evidence == evidence)
    return {(record.suite, record.name): record.wall_s for record in records if record.wall_s}
