"""What a run has to do: the experiments and comparisons of a suite that the store lacks, as launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from repro.config import ConfigError, Experiment
from repro.config.suites import Comparison, Entry, Suite
from repro.config.suites.entry import listed
from repro.results.schema import CONCLUSIVE
from repro.results.select import by_key, by_keys
from repro.results.store import Store


@dataclass(frozen=True, kw_only=True)
class Task:
    """Experiments to be run in one launch; if one of them fails, the others get a launch without it."""

    experiments: tuple[Experiment, ...]
    comparison: Comparison | None = None

    @property
    def keys(self) -> list[str]:
        """Keys of all experiments."""
        return [experiment.key for experiment in self.experiments]


def select(suite: Suite, only: list[str]) -> list[Entry]:
    """Entries whose name matches any glob of `only`; all without one.  `ConfigError` if none does."""
    names = [entry.experiment.name for entry in suite.entries]
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in names):
            expected = f"a glob that matches an experiment of {suite.file}: {listed(names)}"
            raise ConfigError("--only", glob, expected)
    if not only:
        return list(suite.entries)
    return [entry for entry in suite.entries if any(fnmatchcase(entry.experiment.name, g) for g in only)]


def tasks(suite: Suite, entries: list[Entry], store: Store, *, rerun: bool) -> list[Task]:
    """What the store lacks of `entries`, in the order of the file."""
    todo: list[Task] = []
    compared: set[str] = set()
    experiments = {entry.experiment.name: entry.experiment for entry in entries}
    for comparison in suite.comparisons:
        if comparison.baseline not in experiments:
            continue
        subjects = tuple(name for name in comparison.subjects if name in experiments)
        if not subjects:
            continue
        compared.update((comparison.baseline, *subjects))
        members = tuple(experiments[name] for name in (comparison.baseline, *subjects))
        todo.append(Task(experiments=members, comparison=replace(comparison, subjects=subjects)))
    launches: dict[str, list[Experiment]] = {}
    for entry in entries:
        if entry.experiment.name not in compared:
            launches.setdefault(entry.launch or f"\0{entry.experiment.name}", []).append(entry.experiment)
    todo += [Task(experiments=tuple(members)) for members in launches.values()]
    order = {entry.experiment.name: place for place, entry in enumerate(suite.entries)}
    todo.sort(key=lambda task: min(order[experiment.name] for experiment in task.experiments))
    if rerun:
        return todo
    return [rest for task in todo for rest in missing_tasks(task, store)]


def missing_tasks(task: Task, store: Store) -> list[Task]:
    """What the store still lacks of `task`: nothing, a smaller task, or all of it.

    A comparison needs its baseline beside every subject, even where the baseline alone is known; it cannot
    be had with one that runs out of memory or diverges.
    """
    latest = by_key(store.records())
    outcomes = {key: latest[key].outcome for key in task.keys if key in latest}
    unknown = [e for e in task.experiments if outcomes.get(e.key) not in CONCLUSIVE]
    if task.comparison is None:
        return [replace(task, experiments=tuple(unknown))] if unknown else []
    baseline, *subjects = task.experiments
    comparable = outcomes.get(baseline.key, "ok") not in ("oom", "diverged")
    if not comparable:
        return [Task(experiments=tuple(unknown))] if unknown else []
    known = by_keys(store.records())
    open_subjects = [
        subject
        for subject in subjects
        if subject in unknown or (outcomes[subject.key] == "ok" and (baseline.key, subject.key) not in known)
    ]
    if open_subjects:
        return [replace(task, experiments=(baseline, *open_subjects))]
    return [Task(experiments=(baseline,))] if baseline in unknown else []
