"""Runner of experiments: launches each group of experiments with any launcher of ranks, and records outcomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from repro.config import Experiment
from repro.emulate.network import NoNetwork
from repro.launch import plan, supervise
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.plan import ExperimentLocks, Task
from repro.launch.progress import Progress
from repro.launch.rank.program import DEFAULT_TARGET
from repro.launch.rank_process import Position
from repro.launch.recorder import Recorder, Results, disk_full_errors
from repro.results.store import DISK_FULL


class StopRequest(Protocol):
    """Request to stop a run, true once made. Ranks have `stop_s` seconds for their step and a checkpoint."""

    @property
    def stop_s(self) -> float: ...
    @property
    def reason(self) -> str: ...
    def __bool__(self) -> bool: ...


class RecordedLaunch(supervise.WatchedLaunch, Protocol):
    """Interface of a launch that returns the results of finished experiments while it runs."""

    logs: Path

    def start(self) -> None: ...
    def results(self, index: int) -> Results | None: ...
    def close(self, *, keep_logs: Path | None) -> None: ...


@dataclass(frozen=True)
class Launcher:
    """Launcher of jobs: the function that creates a launch, the folder of logs, and the locks on experiments."""

    logs: Path
    """Folder with a subfolder of logs for the key of each failed experiment."""
    launch: Callable[[Job, Path], RecordedLaunch]
    """Function that creates a launch, without starting it, from a job and a log folder."""
    locks: ExperimentLocks | None = None
    """Locks on the keys of experiments; None if no other process can run the same experiments."""


def local_launcher(root: Path) -> Launcher:
    """Return a launcher that runs jobs as processes of this machine, for the results store at `root`."""
    locks = ExperimentLocks(root)

    def launch(job: Job, logs: Path) -> LocalLaunch:
        started = LocalLaunch(job, logs, target=rank_target())
        locks.remember(started.folder)  # If this process is killed, the next run removes the launch folder.
        return started

    return Launcher(root / "logs", launch, locks)


def rank_target() -> str:
    """Return the function that each rank calls, as `module:function`; tests name another one in REPRO_RANK_TARGET."""
    return os.environ.get("REPRO_RANK_TARGET", DEFAULT_TARGET)


class Runner:
    """Runs tasks (groups of experiments in one launch) one after another, and records each experiment's outcome."""

    def __init__(
        self,
        recorder: Recorder,
        progress: Progress,
        interrupt: StopRequest,
        launcher: Launcher,
        *,
        rerun: bool,
        profile: bool = False,
    ):
        self.recorder, self.progress, self.launcher = recorder, progress, launcher
        self.store = recorder.store
        self.interrupt, self.rerun = interrupt, rerun
        self.profile = profile

    def run(self, tasks: list[Task]) -> None:
        """Run all tasks (groups of experiments); tasks that another process has locked run last. Raises `DiskFull`."""
        waiting = list(tasks)

        def run_unlocked() -> bool:
            waiting[:] = [task for task in waiting if not self.interrupt and not self._claim(task)]
            return not waiting

        def announce() -> None:
            names = ", ".join(e.name for task in waiting for e in task.experiments)
            self.progress.say(f"waiting for another `repro run` on this store: {names}")

        plan.retry_until_done(run_unlocked, lambda: bool(self.interrupt), announce)

    def _claim(self, task: Task) -> bool:
        """Lock the experiments of `task` and run them; return False if another process has locked one of them."""
        locks = self.launcher.locks
        with disk_full_errors(self.store.root):
            self.store.prepare()
            if locks is not None and not locks.take(task.keys):
                return False
        try:
            # Another process may have finished experiments of the task after this process planned the run.
            rest = [task] if self.rerun else plan.missing_tasks(task, self.store)
            left = {experiment.name for part in rest for experiment in part.experiments}
            self.progress.elsewhere(len(task.experiments) - len(left))
            for part in rest:
                self._run(part)
        finally:
            if locks is not None:
                locks.release()
        return True

    def _run(self, task: Task) -> None:
        """Launch the experiments of `task` together. After a failure, launch again the experiments without outcome."""
        comparison, root = task.comparison, self.store.root.absolute()
        remaining = list(task.experiments)
        while remaining and not self.interrupt:
            job = Job(
                experiments=remaining,
                checkpoints=str(root / "checkpoints"),
                profiles=str(root / "profiles") if self.profile else "",
            )
            if comparison and len(remaining) > 1 and remaining[0].name == comparison.baseline:
                job = replace(job, compare=True, rounds=comparison.rounds, apart=comparison.apart)
            remaining = self._launch(job)

    def _launch(self, job: Job) -> list[Experiment]:
        """Run one job, record the outcomes of its experiments, and return the experiments without an outcome."""
        self.progress.launch(job)
        self.recorder.begin()
        logs = self.launcher.logs
        launch = self.launcher.launch(job, logs / job.experiments[0].key)
        finished: dict[int, Results] = {}
        blamed: list[int] = []
        has_announced_stop = False

        def harvest(spent_s: list[float]) -> None:
            """Record new results in the job's order; a comparison has results only at the end of the launch."""
            while len(finished) < len(job.experiments):
                index = len(finished)
                results = launch.results(index)
                if results is None:
                    return
                finished[index] = results
                self.recorder.outcome(job.experiments[index], spent_s[index], results=results)

        def tick(position: Position, spent_s: list[float]) -> None:
            nonlocal has_announced_stop
            self.progress.tick(position)
            harvest(spent_s)
            if self.interrupt and not has_announced_stop:
                has_announced_stop = True
                text = "waiting for the current step and its checkpoint; a second signal ends the run at once"
                self.progress.say(text)

        try:
            ending = _watch_launch(launch, self.interrupt, tick)
            harvest(ending.spent_s)
            blamed = _blamed_experiments(job, ending, finished)
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


def _watch_launch(
    launch: RecordedLaunch, interrupt: StopRequest, tick: Callable[[Position, list[float]], None]
) -> supervise.Ending:
    """Start a launch and wait for its end. A full disk or a failed network emulation gives the outcome `error`."""
    try:
        launch.start()
    except NoNetwork as error:
        return supervise.Ending("error", str(error), -1, [0.0] * len(launch.job.experiments))
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        reason = f"disk full while starting the ranks: {error.filename or launch.logs}"
        return supervise.Ending("error", reason, -1, [0.0] * len(launch.job.experiments))
    return supervise.watch(
        launch, interrupted=lambda: interrupt.reason, stop_s=lambda: interrupt.stop_s, tick=tick
    )


def _blamed_experiments(job: Job, ending: supervise.Ending, finished: Container[int]) -> list[int]:
    """Return indices of experiments that get the outcome of the ended launch; others are launched again."""
    open_ones = [index for index in range(len(job.experiments)) if index not in finished]
    if not open_ones:
        return []
    if ending.outcome == "ok":
        return open_ones
    if ending.outcome == "interrupted":
        running = [index for index in open_ones if index >= ending.experiment] or open_ones
        return open_ones if job.compare else running[:1]
    # If ranks failed before their first experiment, each experiment would fail again.
    if ending.experiment < 0:
        return open_ones
    return [ending.experiment] if ending.experiment in open_ones else open_ones[:1]
