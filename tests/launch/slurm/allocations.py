"""Allocations without SLURM: what srun would start, as plain processes with the environment that SLURM would set."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from submitit.core.utils import DelayedSubmission

from repro import suites
from repro.launch.plan import Task
from repro.launch.slurm.allocation import Allocation
from repro.launch.slurm.work import Bundle, Work
from tests.launch.runs import FAKE, ROOT, wait_for
from tests.records import lines

PROFILE = "[slurm]\ntasks_per_node = 2\n"
SCONTROL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in show*) echo "JobId=7 JobState={state} PreemptTime={preempted}";; esac
"""


class Submission:
    """A submission with one bundle, made by hand."""

    def __init__(self, root: Path, suite: Path, *, profile: str = PROFILE, rerun: bool = False):
        self.results = root / "results"
        self.folder = self.results / "jobs" / "test"
        self.submitit = self.folder / "submitit"
        self.submitit.mkdir(parents=True)
        (self.folder / "profile.toml").write_text(profile)
        loaded = suites.load(suite)
        compared = {name for c in loaded.comparisons for name in (c.baseline, *c.subjects)}
        known = {entry.experiment.name: entry.experiment for entry in loaded.entries}
        tasks = [
            Task(experiments=tuple(known[name] for name in (c.baseline, *c.subjects)), comparison=c)
            for c in loaded.comparisons
        ]
        alone = [entry.experiment for entry in loaded.entries if entry.experiment.name not in compared]
        tasks += [Task(experiments=(experiment,)) for experiment in alone]
        Work(suite=loaded, bundles=(Bundle(index=0, tasks=tuple(tasks)),), rerun=rerun).save(self.folder)
        delayed = DelayedSubmission(Allocation(str(self.folder), 0))
        delayed.set_timeout(60, 3)
        delayed.dump(self.submitit / "7_submitted.pkl")
        self.bin, self.ring, self.calls = root / "bin", root / "ring", root / "scontrol.log"
        self.bin.mkdir()
        self.ring.mkdir()
        self.says()

    def says(self, *, state: str = "RUNNING", preempted: str = "2026-11-21T10:00:00") -> None:
        """What `scontrol show job` answers."""
        program = self.bin / "scontrol"
        program.write_text(SCONTROL.format(log=self.calls, state=state, preempted=preempted))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def records(self) -> list[dict[str, Any]]:
        """All that was recorded."""
        return lines(self.results)

    def outcomes(self) -> dict[str, str]:
        """Of the newest record of each experiment."""
        return {r["name"]: r["outcome"] for r in self.records() if r["kind"] == "experiment"}

    def reasons(self) -> dict[str, str]:
        """Of the newest record of each experiment."""
        return {r["name"]: r["reason"] for r in self.records() if r["kind"] == "experiment"}

    @property
    def state(self) -> dict[str, Any]:
        """The bundle's file; empty while there is none."""
        path = self.folder / "bundle-0.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


class Srun:
    """The tasks of one start of the job, `per_node` on each node."""

    def __init__(
        self, submission: Submission, *, tasks: int = 2, per_node: int = 1, restarts: int = 0, **more: str
    ):
        self.submission = submission
        nodes = [f"n{1 + task // per_node}" for task in range(tasks)]
        self.tasks: list[subprocess.Popen[str]] = []
        self.logs: list[Path] = []
        for task in range(tasks):
            environment = {
                **os.environ,
                "PATH": f"{submission.bin}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "SUBMITIT_EXECUTOR": "slurm",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": ",".join(dict.fromkeys(nodes)),
                "SLURM_JOB_NUM_NODES": "1",  # one machine: the loopback interface reaches all of them
                "SLURM_NTASKS": str(tasks),
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % per_node),
                "SLURM_NODEID": str(task // per_node),
                "SLURMD_NODENAME": nodes[task],
                "SLURM_RESTART_COUNT": str(restarts),
                "SLURM_CPUS_PER_TASK": "1",
                "REPRO_RANK_TARGET": FAKE,
                "FAKE_RING": str(submission.ring),
                **more,
            }
            self.logs.append(submission.folder / f"task-{task}-{restarts}.log")
            with open(self.logs[-1], "w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "submitit.core._submit", str(submission.submitit)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            self.tasks.append(process)

    def wait(self, seconds: float = 40) -> list[int]:
        """Exit codes of all tasks."""
        try:
            return [task.wait(seconds) for task in self.tasks]
        finally:
            self.kill()

    def signal(self, number: int) -> None:
        """As slurmstepd: to every process of every task, ranks included."""
        for task in self.tasks:
            if task.poll() is None:
                family = [psutil.Process(task.pid), *psutil.Process(task.pid).children(recursive=True)]
                for process in family:
                    process.send_signal(number)

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run now."""
        found = {}
        for task in self.tasks:
            if task.poll() is not None:
                continue
            for process in psutil.Process(task.pid).children(recursive=True):
                try:
                    line = process.cmdline()
                except psutil.Error:
                    continue
                if "repro.launch.rank" in line:
                    found[int(line[line.index("--rank") + 1])] = process
        return found

    def reach(self, name: str, step: int = 0) -> dict[int, psutil.Process]:
        """Wait until experiment `name` is in its `step`-th step or later; its ranks."""

        def there() -> bool:
            current = self.submission.state.get("current") or {}
            if name not in current.get("names", []) or current["phase"] == "start":
                return False
            return bool(current["step"] >= step)

        wait_for(there, 60)
        return self.ranks()

    def kill(self) -> None:
        """Leave nothing behind."""
        for task in self.tasks:
            if task.poll() is None:
                children = psutil.Process(task.pid).children(recursive=True)
                for process in [psutil.Process(task.pid), *children]:
                    try:
                        process.send_signal(signal.SIGKILL)
                    except psutil.NoSuchProcess:
                        continue
                task.wait(10)

    def log(self) -> str:
        """What all tasks printed."""
        return "\n".join(path.read_text() for path in self.logs)
