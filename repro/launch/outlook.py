"""What `repro run` would do, where, and how long it took last time: nothing is started and nothing is written.

How long a step takes here is known from records alone: nothing predicts cores that nobody calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from repro.config import Experiment
from repro.launch import plan, simulated
from repro.launch.local.launch import DEVICES
from repro.launch.run import asked, lacking
from repro.render import words
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.results.store import Store
from repro.suites import Entry, Suite

Took: TypeAlias = dict[tuple[str, str], float]
"""Seconds by suite and name."""
TO_RUN, KNOWN, ELSEWHERE = "to run", "in the store", "not here"


@dataclass(frozen=True)
class Outlook:
    """What would become of one experiment."""

    suite: str
    name: str
    state: str
    """`TO_RUN`, `KNOWN` or `ELSEWHERE`."""
    where: str
    """The processes, or what is lacking."""
    steps: int
    """That it takes."""
    last_s: float | None
    """Seconds that the newest record of this name took; None without one, and then nothing says how long it takes."""
    limit_s: float
    """Seconds after which a launch is stopped; 0: never."""


def outlook(
    suites: Sequence[Path], only: list[str], results: Path, rerun: bool, evidence: str, system: str
) -> list[Outlook]:
    """Every selected experiment, in the order of the files.  Raises `ConfigError`."""
    store = Store(results)
    found: list[Outlook] = []
    took = _took(store, evidence)
    for suite in asked(suites, evidence, system):
        entries = plan.select(suite, only)
        if evidence == SIMULATED:
            if system:
                entries = simulated.moved(entries, system)
            found += _simulated(suite, entries, store, rerun, took)
        else:
            found += _measured(suite, entries, store, rerun, took)
    return found


def _measured(suite: Suite, entries: list[Entry], store: Store, rerun: bool, took: Took) -> Iterable[Outlook]:
    without = {entry.experiment.name: lacking(entry) for entry in entries}
    here = [entry for entry in entries if not without[entry.experiment.name]]
    todo = {e.name for task in plan.tasks(suite, here, store, rerun=rerun) for e in task.experiments}
    for entry in entries:
        name, limit_s = entry.experiment.name, entry.experiment.limits.timeout_s
        steps = entry.experiment.training.steps
        if without[name]:
            yield Outlook(suite.name, name, ELSEWHERE, f"needs {without[name]}", steps, None, limit_s)
        else:
            state, last_s = TO_RUN if name in todo else KNOWN, took.get((suite.name, name))
            yield Outlook(suite.name, name, state, _processes(entry.experiment), steps, last_s, limit_s)


def _processes(experiment: Experiment) -> str:
    what = "rank" if DEVICES[experiment.system] == "cpu" else "GPU"
    said = words.counted(experiment.layout.world, what)
    return f"{said} here, {experiment.network}" if experiment.network is not None else f"{said} here"


def _simulated(
    suite: Suite, entries: list[Entry], store: Store, rerun: bool, took: Took
) -> Iterable[Outlook]:
    without = {entry.experiment.name: simulated.needs(entry.experiment) for entry in entries}
    can = [entry for entry in entries if not without[entry.experiment.name]]
    on = {entry.experiment.name: simulated.system_of(entry.experiment) for entry in can}
    todo = {entry.experiment.name for entry in simulated.lacking(can, store, on, rerun)}
    for entry in entries:
        name, ranks = entry.experiment.name, entry.experiment.layout.world
        if without[name]:
            yield Outlook(suite.name, name, ELSEWHERE, f"needs {without[name]}", 1, None, 0.0)
        else:
            state = TO_RUN if name in todo else KNOWN
            where = f"{words.counted(ranks, 'rank')} of {entry.experiment.system}, traced here"
            yield Outlook(suite.name, name, state, where, 1, took.get((suite.name, name)), 0.0)


def _took(store: Store, evidence: str) -> Took:
    """Of the newest record of each experiment of a kind of evidence."""
    records = (r for r in store.records() if isinstance(r, ExperimentRecord) and r.evidence == evidence)
    return {(record.suite, record.name): record.wall_s for record in records if record.wall_s}
