"""``repro run``: bring the store to where it holds a conclusive record of every selected experiment."""

from __future__ import annotations

import json as jsonlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

from repro import suites
from repro.config import ConfigError, Experiment
from repro.launch import local, plan, supervise
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.launch.locks import Locks
from repro.launch.plan import Task
from repro.launch.progress import Progress
from repro.launch.rank import TARGET
from repro.launch.summary import show, summarise
from repro.results.store import CONCLUSIVE, DISK_FULL, Store

WAIT_S = 0.5
"""How often a key is tried again that another ``repro run`` is working on."""


def command(suite: Path, only: list[str], results: Path, launcher: str, rerun: bool, json: bool) -> int:
    """Run what the store lacks of ``suite`` and print a summary.

    Returns 0 if every selected experiment has the outcome that the suite expects, 1 if not, and 128 plus the
    signal's number if it was interrupted.  Raises ``ConfigError`` before anything is started.
    """
    loaded = suites.load(suite)
    if launcher != "local":
        raise ConfigError("--launcher", launcher, "local")
    entries = plan.select(loaded, only)
    for entry in entries:
        local.check(entry.experiment, file=f'{loaded.file}: experiment "{entry.experiment.name}"')
    with Store(results) as store, Interrupt() as interrupt:
        tasks = plan.tasks(loaded, entries, store, rerun=rerun)
        todo = {experiment.name for task in tasks for experiment in task.experiments}
        with Progress(total=len(todo), known=len(entries) - len(todo)) as progress:
            runner = _Runner(loaded, store, progress, interrupt, rerun)
            runner.adopt(entries)
            failure = runner.run(tasks)
        summary = summarise(loaded, entries, store, ran=todo)
    summary["stopped"] = failure or (f"by signal {interrupt.signal}" if interrupt else "")
    if json:
        print(jsonlib.dumps(summary))
    else:
        show(summary)
    if interrupt:
        return 128 + interrupt.signal
    return 0 if not failure and all(row["expected"] for row in summary["experiments"]) else 1


class _Runner:
    """Runs tasks one after another and records how each experiment ended."""

    def __init__(
        self, suite: suites.Suite, store: Store, progress: Progress, interrupt: Interrupt, rerun: bool
    ):
        self.suite, self.store, self.progress = suite, store, progress
        self.interrupt, self.rerun = interrupt, rerun
        self.locks = Locks(store.root)
        self.target = os.environ.get("REPRO_RANK_TARGET", TARGET)  # tests put a stand-in here

    def adopt(self, entries: list[suites.Entry]) -> None:
        """Record under this suite's names what the store knows under others: equal key, equal experiment."""
        latest = self.store.latest()
        for entry in entries:
            name, record = entry.experiment.name, latest.get(entry.experiment.key)
            if record is None or record["outcome"] not in CONCLUSIVE:
                continue
            if (record["suite"], record["name"]) != (self.suite.name, name):
                own = {
                    "id": uuid.uuid4().hex,
                    "suite": self.suite.name,
                    "name": name,
                    "copy_of": record["id"],
                }
                self.store.append({**record, **own, "experiment": entry.experiment.as_dict()})

    def run(self, tasks: list[Task]) -> str:
        """Run all tasks; what another process is working on comes last.  Returns why it stopped early."""
        waiting = list(tasks)
        told = False
        while waiting and not self.interrupt:
            deferred = []
            for task in waiting:
                if self.interrupt:
                    break
                try:
                    self.store.prepare()
                    if not self.locks.take(task.keys):
                        deferred.append(task)
                        continue
                    # Another process may have finished it between our plan and our lock.
                    rest = [task] if self.rerun else plan.lacking(task, self.store)
                    left = {e.name for part in rest for e in part.experiments}
                    self.progress.elsewhere(len(task.experiments) - len(left))
                    for part in rest:
                        self._run(part)
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    return f"disk full: {self.store.root}"
                finally:
                    self.locks.release()
            waiting = deferred
            if waiting and not self.interrupt:
                if not told:
                    names = ", ".join(e.name for task in waiting for e in task.experiments)
                    self.progress.say(f"waiting for another `repro run` on this store: {names}")
                    told = True
                time.sleep(WAIT_S)
        return ""

    def _run(self, task: Task) -> None:
        """Launch a task's experiments; after a failure, launch again those that it was not about."""
        remaining = list(task.experiments)
        while remaining and not self.interrupt:
            comparison = task.comparison
            compare = (
                comparison is not None and len(remaining) > 1 and remaining[0].name == comparison.baseline
            )
            rounds = comparison.rounds if comparison is not None else 1
            job = Job(experiments=remaining, rounds=rounds if compare else 1, compare=compare)
            remaining = self._launch(job)

    def _launch(self, job: Job) -> list[Experiment]:
        """Run one job, record what came of it, and return the experiments that still have no outcome."""
        from repro.measure.provenance import provenance

        self.progress.launch(job.experiments, compare=job.compare)
        logs = self.store.root / "logs"
        launch = local.LocalLaunch(job, logs / job.experiments[0].key, target=self.target)
        self.locks.remember(launch.folder)
        keep: Path | None = None
        try:
            launch.start()
            ending = supervise.watch(
                launch, interrupted=lambda: bool(self.interrupt), tick=self.progress.tick
            )
            finished = {i: r for i in range(len(job.experiments)) if (r := launch.results(i)) is not None}
            blamed = _blamed(job, ending, set(finished))
            if blamed:
                keep = logs / job.experiments[blamed[0]].key
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            reason = f"disk full while starting the ranks: {error.filename or logs}"
            ending = supervise.Ending("error", reason, -1, [0.0] * len(job.experiments))
            finished, blamed = {}, list(range(len(job.experiments)))
        finally:
            launch.close(keep_logs=keep)
        source = provenance()
        for index, experiment in enumerate(job.experiments):
            spent = ending.spent_s[index]
            if index in finished:
                self._record(experiment, finished[index], "ok", "", spent, source)
            elif index in blamed:
                reason = ending.reason or "the ranks ended without a result"
                outcome = ending.outcome if ending.outcome != "ok" else "error"
                self._record(experiment, [], outcome, reason, spent, source)
        if job.compare:
            self._compare(job, finished, source)
        return [e for i, e in enumerate(job.experiments) if i not in finished and i not in blamed]

    def _record(
        self,
        experiment: Experiment,
        results: list[dict[str, Any]],
        outcome: str,
        reason: str,
        spent_s: float,
        source: dict[str, Any],
    ) -> None:
        from repro.results.record import experiment_record

        record = experiment_record(
            experiment,
            results,
            suite=self.suite.name,
            provenance=source,
            wall_s=spent_s,
            outcome=outcome,
            reason=reason,
        )
        try:
            self.store.append(record)
        except OSError as error:
            if error.errno in DISK_FULL:
                # The store has freed its reserve: the outcome fits, the measurement does not.
                full = f"disk full while writing the result to {self.store.folder}"
                short = experiment_record(
                    experiment,
                    [],
                    suite=self.suite.name,
                    provenance={},
                    wall_s=spent_s,
                    outcome="error",
                    reason=full,
                )
                self.store.append(short)
                self.progress.ended(experiment.name, "error", full, spent_s, expected=False)
            raise
        expected = record["outcome"] == self.suite.entry(experiment.name).expect
        self.progress.ended(experiment.name, record["outcome"], record["reason"], spent_s, expected=expected)

    def _compare(self, job: Job, finished: dict[int, list[dict[str, Any]]], source: dict[str, Any]) -> None:
        from repro.results.record import comparison_record

        for index in range(1, len(job.experiments)):
            if not {0, index} <= finished.keys():
                continue
            record = comparison_record(
                job.experiments[0],
                job.experiments[index],
                (finished[0], finished[index]),
                suite=self.suite.name,
                provenance=source,
            )
            if record is not None:
                self.store.append(record)


def _blamed(job: Job, ending: supervise.Ending, finished: set[int]) -> list[int]:
    """Indices of the unfinished experiments that a failed launch was about."""
    open_ones = [index for index in range(len(job.experiments)) if index not in finished]
    if not open_ones:
        return []
    if ending.outcome == "ok":
        return open_ones
    if ending.outcome == "interrupted":
        running = [index for index in open_ones if index >= ending.experiment] or open_ones
        return open_ones if job.compare else running[:1]
    if ending.experiment < 0:  # the start failed, and would fail again for each of them
        return open_ones
    return [ending.experiment] if ending.experiment in open_ones else open_ones[:1]
