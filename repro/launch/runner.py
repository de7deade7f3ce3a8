"""Run tasks one after another with whatever starts their ranks, and record how each experiment ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Protocol

from repro.config import Experiment
from repro.emulate.network import NoNetwork
from repro.launch import plan, supervise
from repro.launch.heartbeat import Position
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.plan import Task
from repro.launch.progress import Progress
from repro.launch.rank.program import DEFAULT_TARGET
from repro.launch.recorder import DiskFull, Recorder, Results
from repro.results.store import DISK_FULL

LOCK_RETRY_INTERVAL_S = 0.5
"""Interval between attempts to lock a key that another `repro run` holds, in seconds."""


class StopRequest(Protocol):
    """True when nothing further is to be started and what runs is to end; `reason` then says who wants it."""

    @property
    def stop_s(self) -> float: ...  # how long a rank may take to write its checkpoint then
    @property
    def reason(self) -> str: ...
    def __bool__(self) -> bool: ...


class RecordedLaunch(supervise.WatchedLaunch, Protocol):
    """One started job, of which results can be had while it runs."""

    logs: Path

    def start(self) -> None: ...
    def results(self, index: int) -> Results | None: ...
    def close(self, *, keep_logs: Path | None) -> None: ...


class Launcher(Protocol):
    """What starts jobs."""

    logs: Path
    """Below it, the logs of failed experiments by key."""

    def take(self, keys: list[str]) -> bool:
        """Keep others from these experiments; False if somebody is at one of them."""

    def release(self) -> None:
        """Let others have them."""

    def launch(self, job: Job, logs: Path) -> RecordedLaunch:
        """A launch of `job` that is not yet started."""


class LocalLauncher:
    """Jobs as processes of this machine, under locks that other `repro run` on the same store respect."""

    def __init__(self, root: Path):
        self.logs = root / "logs"
        self.target = rank_target()
        self._locks = ExperimentLocks(root)

    def take(self, keys: list[str]) -> bool:
        """Lock the keys."""
        return self._locks.take(keys)

    def release(self) -> None:
        """Unlock them."""
        self._locks.release()

    def launch(self, job: Job, logs: Path) -> LocalLaunch:
        """One process per rank, whose files are swept up by whoever comes after a kill."""
        launch = LocalLaunch(job, logs, target=self.target)
        self._locks.remember(launch.folder)
        return launch


def rank_target() -> str:
    """The function that a rank runs; tests put a stand-in here."""
    return os.environ.get("REPRO_RANK_TARGET", DEFAULT_TARGET)


class Runner:
    """Runs tasks one after another and records how each experiment ended."""

    def __init__(
        self,
        recorder: Recorder,
        progress: Progress,
        interrupt: StopRequest,
        launcher: Launcher,
        *,
        rerun: bool,
    ):
        self.recorder, self.progress, self.launcher = recorder, progress, launcher
        self.store = recorder.store
        self.interrupt, self.rerun = interrupt, rerun

    def run(self, tasks: list[Task]) -> None:
        """Run all tasks; what another process is working on comes last.  Raises `DiskFull`."""
        waiting = list(tasks)
        told = False
        while waiting and not self.interrupt:
            waiting = [task for task in waiting if not self.interrupt and not self._claim(task)]
            if waiting and not self.interrupt:
                if not told:
                    names = ", ".join(e.name for task in waiting for e in task.experiments)
                    self.progress.say(f"waiting for another `repro run` on this store: {names}")
                    told = True
                time.sleep(LOCK_RETRY_INTERVAL_S)

    def _claim(self, task: Task) -> bool:
        """Run `task` under the locks of its keys; False if another process has one of them."""
        try:
            self.store.prepare()
            if not self.launcher.take(task.keys):
                return False
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise DiskFull(f"disk full: {error.filename or self.store.root}") from None
        try:
            # Another process may have finished it between our plan and our lock.
            rest = [task] if self.rerun else plan.missing_tasks(task, self.store)
            left = {experiment.name for part in rest for experiment in part.experiments}
            self.progress.elsewhere(len(task.experiments) - len(left))
            for part in rest:
                self._run(part)
        finally:
            self.launcher.release()
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
            apart = comparison is not None and compare and comparison.apart
            checkpoints = str((self.store.root / "checkpoints").absolute())
            job = Job(
                experiments=remaining, rounds=rounds, compare=compare, apart=apart, checkpoints=checkpoints
            )
            remaining = self._launch(job)

    def _launch(self, job: Job) -> list[Experiment]:
        """Run one job, record what came of it, and return the experiments that still have no outcome."""
        self.progress.launch(job)
        self.recorder.begin()
        logs = self.launcher.logs
        launch = self.launcher.launch(job, logs / job.experiments[0].key)
        finished: dict[int, Results] = {}
        blamed: list[int] = []
        told: list[bool] = []

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
            if self.interrupt and not told:
                told.append(True)
                self.progress.say("waiting for the step and its checkpoint; a second signal ends it at once")

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
    launch: RecordedLaunch, interrupt: StopRequest, tick: Callable[[Position, list[float]], None]
) -> supervise.Ending:
    """Start a launch and see it to its end, which may be that there is no room for its logs, or no such network."""
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


class ExperimentLocks:
    """Locks on experiment keys, with which two `repro run` on one store share the work.

    A lock is an `flock` on `root/locks/<key>`, which the kernel releases when its holder dies. The text of the file
    names the folder with the holder's short-lived files. The next holder removes that folder after a kill.
    """

    def __init__(self, root: Path):
        self._folder = root / "locks"
        self._held: list[int] = []

    def take(self, keys: list[str]) -> bool:
        """Lock all `keys` without waiting; False, and none is held, if another process has one of them."""
        assert not self._held, "one set of keys at a time"
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
        """Write the folder of the holder's files into the locks, for the next holder after a kill."""
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "folder": str(folder)})
        for descriptor in self._held:
            with contextlib.suppress(OSError):  # only tidiness is lost
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, note.encode(), 0)

    def release(self) -> None:
        """Release all keys."""
        for descriptor in self._held:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        self._held = []


def _remove_leftovers(descriptor: int) -> None:
    """Remove the files of a killed holder on this host."""
    text = os.pread(descriptor, 4096, 0)
    if not text:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(text)
        folder = Path(note["folder"])
        if note["host"] == socket.gethostname() and folder.name.startswith("repro-"):
            shutil.rmtree(folder, ignore_errors=True)
    os.ftruncate(descriptor, 0)
