"""Tasks of a run (experiments and comparisons of a suite that have no record), and locks between concurrent runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from repro.config import ConfigError, Experiment
from repro.config.errors import listed
from repro.config.suites import Comparison, Entry, Suite
from repro.results.schema import CONCLUSIVE
from repro.results.select import by_key, by_keys
from repro.results.store import Store

LOCK_RETRY_INTERVAL_S = 0.5
"""Interval between attempts to lock an experiment that another `repro run` has locked, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Experiments that one launch runs. If one of them fails, a second launch runs the remaining ones."""

    experiments: tuple[Experiment, ...]
    comparison: Comparison | None = None

    @property
    def keys(self) -> list[str]:
        """Return the keys of the task's experiments, which are hashes of their settings."""
        return [experiment.key for experiment in self.experiments]


def select_entries(suite: Suite, only: list[str]) -> list[Entry]:
    """Return the entries (experiments) of a suite whose name matches a glob of `only`; all entries if `only` is empty.

    A glob `suite/name` applies only to the suite of that name. Raises `ConfigError` for a glob without a match.
    """
    names = [entry.experiment.name for entry in suite.entries]
    own = f"{suite.name}/"
    only = [glob.removeprefix(own) for glob in only if "/" not in glob or glob.startswith(own)]
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in names):
            expected = f"a glob that matches an experiment of {suite.file}: {listed(names)}"
            raise ConfigError("--only", glob, expected)
    wanted = only or ["*"]
    return [entry for entry in suite.entries if any(fnmatchcase(entry.experiment.name, g) for g in wanted)]


def plan_tasks(suite: Suite, entries: list[Entry], store: Store, *, rerun: bool) -> list[Task]:
    """Return the launches for experiments without an `ok`, `oom` or `diverged` record (`rerun`: for all `entries`)."""
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
    """Return tasks (at most one) for the experiments of `task` that have no `ok`, `oom` or `diverged` record.

    A comparison relates subjects to a baseline. The remaining subjects run with the baseline, even if it has a record.
    If the baseline ran out of memory or diverged, the subjects run without a comparison.
    """
    latest = by_key(store.records())
    outcomes = {key: latest[key].outcome for key in task.keys if key in latest}
    unknown = [e for e in task.experiments if outcomes.get(e.key) not in CONCLUSIVE]
    if task.comparison is None:
        return [replace(task, experiments=tuple(unknown))] if unknown else []
    baseline, *subjects = task.experiments
    if outcomes.get(baseline.key, "ok") in ("oom", "diverged"):
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


def retry_until_done(
    attempt: Callable[[], bool], cancelled: Callable[[], bool], announce: Callable[[], None]
) -> None:
    """Repeat `attempt` (lock experiments) until it or `cancelled` is True; `announce` (a message) precedes waiting."""
    announced = False
    while not attempt() and not cancelled():
        if not announced:
            announce()
            announced = True
        time.sleep(LOCK_RETRY_INTERVAL_S)


class ExperimentLocks:
    """Locks on experiment keys, so that two `repro run` on one store do not run the same experiment.

    A lock is an `flock` on `root/locks/<key>`, which the kernel releases when the locking process dies. The lock file
    names the folder with that process's short-lived files, which the next process with the lock removes.
    """

    def __init__(self, root: Path):
        self._folder = root / "locks"
        self._held: list[int] = []

    def take(self, keys: list[str]) -> bool:
        """Lock all `keys` and return True, or lock none and return False if another process has locked one of them."""
        assert not self._held, "`release` the locked experiments before the next call of `take`"
        self._folder.mkdir(parents=True, exist_ok=True)
        for key in sorted(keys):
            descriptor = os.open(self._folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                self.release()
                return False
            self._held.append(descriptor)
            _remove_leftovers(descriptor)
        return True

    def remember(self, folder: Path) -> None:
        """Write the path of this process's short-lived files into the lock files, for their removal after a kill."""
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "folder": str(folder)})
        for descriptor in self._held:
            # If this write fails and this process is killed, no other process can remove its short-lived files.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, note.encode(), 0)

    def release(self) -> None:
        for descriptor in self._held:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        self._held = []


def _remove_leftovers(descriptor: int) -> None:
    """Remove the short-lived files of a killed process if it ran on this host. The lock file names their folder."""
    text = os.pread(descriptor, 4096, 0)
    if not text:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(text)
        folder = Path(note["folder"])
        if note["host"] == socket.gethostname() and folder.name.startswith("repro-"):
            shutil.rmtree(folder, ignore_errors=True)
    os.ftruncate(descriptor, 0)
