"""``repro run``: bring the store to where it holds a conclusive record of every selected experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from repro import suites
from repro.config import ConfigError, Experiment
from repro.launch import local, plan, simulated, supervise
from repro.launch.beacon import Position
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.launch.locks import Locks
from repro.launch.plan import Task
from repro.launch.progress import Progress
from repro.launch.rank import TARGET
from repro.launch.recorder import DiskFull, Recorder
from repro.launch.summary import conclude, summarise
from repro.results.store import DISK_FULL, MEASURED, SIMULATED, Store

WAIT_S = 0.5
"""How often a key is tried again that another ``repro run`` is working on."""


def command(
    suite: Path,
    only: list[str],
    results: Path,
    launcher: str,
    rerun: bool,
    json: bool,
    evidence: str = MEASURED,
    system: str = "",
) -> int:
    """Run what the store lacks of ``suite`` and print a summary.

    Experiments that need more than this machine are listed and not started.  Returns 0 if every other one
    has the outcome that the suite expects, 1 if not, and 128 plus the signal's number if it was interrupted.
    ``evidence`` simulated: nothing is started, and all of it can be had here, see :mod:`.simulated`.
    Raises ``ConfigError`` before anything is started.
    """
    loaded = suites.load(suite)
    if evidence not in (MEASURED, SIMULATED):
        raise ConfigError("--evidence", evidence, f"{MEASURED} or {SIMULATED}")
    entries = plan.select(loaded, only)
    if evidence == SIMULATED:
        return simulated.run(loaded, entries, results, system, rerun, json)
    if system:
        raise ConfigError(
            "--system", system, f"--evidence {SIMULATED}; measured runs use the machine at hand"
        )
    if launcher != "local":
        raise ConfigError("--launcher", launcher, "local")
    needs = {entry.experiment.name: _needs(entry.experiment) for entry in entries}
    here = [entry for entry in entries if not needs[entry.experiment.name]]
    if not here:
        raise _nothing_here(loaded, entries, needs)
    failure = ""
    with Store(results) as store, Interrupt() as interrupt:
        tasks = plan.tasks(loaded, here, store, rerun=rerun)
        todo = {experiment.name for task in tasks for experiment in task.experiments}
        with Progress(total=len(todo), known=len(here) - len(todo)) as progress:
            recorder = Recorder(loaded, store, progress)
            try:
                recorder.adopt(entries)
                _Runner(recorder, progress, interrupt, rerun).run(tasks)
            except DiskFull as error:
                failure = str(error)
        summary = summarise(loaded, entries, store, ran=todo, needs=needs)
    return conclude(summary, failure=failure, signal=interrupt.signal, json=json)


def _needs(experiment: Experiment) -> str:
    """What keeps ``experiment`` from being measured on this machine, and that it can be simulated instead."""
    needs = local.needs(experiment)
    hint = f"; `--evidence {SIMULATED}` traces it here" if not simulated.needs(experiment) else ""
    return needs and needs + hint


def _nothing_here(suite: suites.Suite, entries: list[suites.Entry], needs: dict[str, str]) -> ConfigError:
    """That nothing of what was selected can run on this machine: in one line, however much it is."""
    first = entries[0].experiment
    place = f'{suite.file}: experiment "{first.name}"'
    if len(entries) > 1:
        place = f'{suite.file}: {len(entries)} experiments, the first of them "{first.name}"'
    return ConfigError("not run", expected=f"needs {needs[first.name]}", file=place)


class _Runner:
    """Runs tasks one after another and records how each experiment ended."""

    def __init__(self, recorder: Recorder, progress: Progress, interrupt: Interrupt, rerun: bool):
        self.recorder, self.progress = recorder, progress
        self.store = recorder.store
        self.interrupt, self.rerun = interrupt, rerun
        self.locks = Locks(self.store.root)
        self.target = os.environ.get("REPRO_RANK_TARGET", TARGET)  # tests put a stand-in here

    def run(self, tasks: list[Task]) -> None:
        """Run all tasks; what another process is working on comes last.  Raises ``DiskFull``."""
        waiting = list(tasks)
        told = False
        while waiting and not self.interrupt:
            waiting = [task for task in waiting if not self.interrupt and not self._claim(task)]
            if waiting and not self.interrupt:
                if not told:
                    names = ", ".join(e.name for task in waiting for e in task.experiments)
                    self.progress.say(f"waiting for another `repro run` on this store: {names}")
                    told = True
                time.sleep(WAIT_S)

    def _claim(self, task: Task) -> bool:
        """Run ``task`` under the locks of its keys; False if another process has one of them."""
        try:
            self.store.prepare()
            if not self.locks.take(task.keys):
                return False
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"disk full: {error.filename or self.store.root}") from None
        try:
            # Another process may have finished it between our plan and our lock.
            rest = [task] if self.rerun else plan.lacking(task, self.store)
            left = {experiment.name for part in rest for experiment in part.experiments}
            self.progress.elsewhere(len(task.experiments) - len(left))
            for part in rest:
                self._run(part)
        finally:
            self.locks.release()
        return True

    def _run(self, task: Task) -> None:
        """Launch a task's experiments; after a failure, launch again those that it was not about."""
        comparison = task.comparison
        remaining = list(task.experiments)
        while remaining and not self.interrupt:
            compare = (
                comparison is not None and len(remaining) > 1 and remaining[0].name == comparison.baseline
            )
            rounds = comparison.rounds if comparison is not None and compare else 1
            remaining = self._launch(Job(experiments=remaining, rounds=rounds, compare=compare))

    def _launch(self, job: Job) -> list[Experiment]:
        """Run one job, record what came of it, and return the experiments that still have no outcome."""
        self.progress.launch(job.experiments, compare=job.compare)
        self.recorder.begin()
        logs = self.store.root / "logs"
        launch = local.LocalLaunch(job, logs / job.experiments[0].key, target=self.target)
        self.locks.remember(launch.folder)
        finished: dict[int, list[dict[str, Any]]] = {}
        blamed: list[int] = []

        def harvest(spent_s: list[float]) -> None:
            """Record what has come in, in order; compared experiments come in together, at the end."""
            while len(finished) < len(job.experiments):
                index = len(finished)
                results = launch.results(index)
                if results is None:
                    return
                finished[index] = results
                self.recorder.outcome(job.experiments[index], spent_s[index], results=results)

        def tick(position: Position, spent_s: list[float]) -> None:
            self.progress.tick(position)
            harvest(spent_s)

        try:
            ending = _watched(launch, self.interrupt, tick)
            harvest(ending.spent_s)
            blamed = _blamed(job, ending, finished)
        finally:
            launch.close(keep_logs=logs / job.experiments[blamed[0]].key if blamed else None)
        for index in blamed:
            failed = ending.outcome != "ok"
            self.recorder.outcome(
                job.experiments[index],
                ending.spent_s[index],
                outcome=ending.outcome if failed else "error",
                reason=ending.reason if failed else "the ranks ended without a result",
            )
        if job.compare:
            self.recorder.ratios(job, finished)
        return [e for i, e in enumerate(job.experiments) if i not in finished and i not in blamed]


def _watched(
    launch: local.LocalLaunch, interrupt: Interrupt, tick: Callable[[Position, list[float]], None]
) -> supervise.Ending:
    """Start a launch and see it to its end, which may be that the disk has no room for its logs."""
    try:
        launch.start()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        reason = f"disk full while starting the ranks: {error.filename or launch.logs}"
        return supervise.Ending("error", reason, -1, [0.0] * len(launch.job.experiments))
    return supervise.watch(launch, interrupted=lambda: bool(interrupt), tick=tick)


def _blamed(job: Job, ending: supervise.Ending, finished: Container[int]) -> list[int]:
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
