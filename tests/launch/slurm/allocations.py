"""Fake allocations: the controller of a job as a process, with the variables that SLURM would set."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from submitit.core.utils import DelayedSubmission

from repro.config import suites
from repro.launch import plan
from repro.launch.failures import failure_class
from repro.launch.slurm.allocation.bundle import Bundle, SubmissionWork
from repro.launch.slurm.allocation.controller import RunBundle
from repro.results.store import Store
from tests.launch.runs import FAKE, ROOT, wait_for
from tests.launch.slurm import fake_srun
from tests.records import lines

PROFILE = '[slurm]\ntasks_per_node = 2\ncpus_per_task = 1\n[environment]\ninterface = "lo"\n'
RANK, TASK = "repro.launch.rank.program", "repro.launch.slurm.allocation.task"
SCONTROL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in show*) echo "JobId=7 JobState={state} PreemptTime={preempted}";; esac
"""


class Submission:
    """A submission with one bundle, written without `repro submit`."""

    def __init__(self, root: Path, suite: Path):
        self.results = root / "results"
        self.folder = self.results / "jobs" / "test"
        self.submitit = self.folder / "submitit"
        self.submitit.mkdir(parents=True)
        (self.folder / "profile.toml").write_text(PROFILE)
        loaded = suites.load_suite(suite)
        tasks = plan.plan_tasks(loaded, list(loaded.entries), Store(self.results), rerun=False)
        bundle = Bundle(index=0, tasks=tuple(tasks))
        SubmissionWork(suite=loaded, bundles=(bundle,), rerun=False).save(self.folder)
        delayed = DelayedSubmission(RunBundle(str(self.folder), 0))
        delayed.set_timeout(60, 3)
        delayed.dump(self.submitit / "7_submitted.pkl")
        self.bin, self.ring, self.calls = root / "bin", root / "ring", root / "scontrol.log"
        self.bin.mkdir()
        self.ring.mkdir()
        self._program("srun", f"#!{sys.executable}\n{Path(fake_srun.__file__).read_text()}")
        self.set_job_state()

    def set_job_state(self, *, state: str = "RUNNING", preempted: str = "2026-11-21T10:00:00") -> None:
        """Set the answer of `scontrol show job`."""
        self._program("scontrol", SCONTROL.format(log=self.calls, state=state, preempted=preempted))

    def _program(self, name: str, text: str) -> None:
        program = self.bin / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def records(self) -> list[dict[str, Any]]:
        """Return all records."""
        return lines(self.results)

    def outcomes(self, key: str = "outcome") -> dict[str, str]:
        """Return the outcome, or the value of another key, in the newest record of each experiment."""
        return {r["name"]: r[key] for r in self.records() if r["kind"] == "experiment"}

    def reasons(self) -> dict[str, str]:
        return self.outcomes("reason")

    def failure_classes(self) -> dict[str, str]:
        reasons = self.reasons()
        return {name: failure_class(outcome, reasons[name]) for name, outcome in self.outcomes().items()}

    @property
    def state(self) -> dict[str, Any]:
        """Return the contents of the bundle's file; empty before the file exists."""
        path = self.folder / "bundle-0.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


class Job:
    """One start of the job on two nodes: the process of the controller, which starts steps with `fake_srun`."""

    def __init__(self, submission: Submission, *, hold: str = "", restarts: int = 0, **env: str):
        """`hold`: experiment whose ranks wait in their second step while a file of its name is in `submission.ring`."""
        self.submission = submission
        environment = {
            **os.environ,
            "PATH": f"{submission.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SUBMITIT_EXECUTOR": "slurm",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1,n2",
            "SLURM_JOB_NUM_NODES": "2",
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "1"),
            **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
            "SLURMD_NODENAME": "n1",
            "SLURM_RESTART_COUNT": str(restarts),
            "REPRO_RANK_TARGET": FAKE,
            "FAKE_RING": str(submission.ring),
            **env,
        }
        if hold:
            (submission.ring / hold).touch()
            environment["FAKE_HOLD"] = str(submission.ring)
        self.output = submission.folder / f"job-{restarts}.log"
        with open(self.output, "w") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-m", "submitit.core._submit", str(submission.submitit)],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._files_before = {*submission.results.rglob("*")}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self) -> int:
        """Wait for the controller and return its exit code."""
        try:
            return self.controller.wait(100)
        finally:
            self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the controller, the tasks and the ranks, as slurmstepd does."""
        for process in (psutil.Process(self.controller.pid), *self.tasks().values(), *self.ranks().values()):
            with suppress(psutil.Error):
                process.send_signal(number)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the running ranks by number."""
        return self._numbered(RANK, lambda process: process.cmdline()[process.cmdline().index("--rank") + 1])

    def tasks(self) -> dict[int, psutil.Process]:
        """Return the running tasks, each of which runs a rank, by number."""
        return self._numbered(TASK, lambda process: process.environ()["SLURM_PROCID"])

    def _numbered(self, word: str, number: Callable[[psutil.Process], str]) -> dict[int, psutil.Process]:
        found = {}
        for process in self._processes():
            with suppress(psutil.Error):
                if word in process.cmdline() and "srun" not in " ".join(process.cmdline()[:3]):
                    found[int(number(process))] = process
        return found

    def _processes(self) -> list[psutil.Process]:
        if self.controller.poll() is not None:
            return []
        controller = psutil.Process(self.controller.pid)
        return [controller, *controller.children(recursive=True)]

    def reach(self, name: str, step: int = 0) -> dict[int, psutil.Process]:
        """Wait until experiment `name` has reached `step`, and return its ranks."""

        def has_reached() -> bool:
            current = self.submission.state.get("current") or {}
            if name not in current.get("names", []) or current["phase"] == "start":
                return False
            return bool(current["step"] >= step)

        wait_for(has_reached)
        return self.ranks()

    def modes_of_files(self) -> set[int]:
        """Return the permissions that other users have for the files which the job has written."""
        written = {*self.submission.results.rglob("*")} - self._files_before
        kinds = {path.suffix for path in written}
        assert {".jsonl", ".out", ".err", ".pkl"} <= kinds, "records, logs of ranks, submitit's result"
        # submitit has the umask of the script; hidden files are for one process.
        own = [path for path in written if path.suffix != ".pkl" and not path.name.startswith(".")]
        return {path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~0o011 for path in own}

    def kill(self) -> None:
        """Kill the controller and its descendants."""
        for process in reversed(self._processes()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.controller.wait(60)

    def log(self) -> str:
        """Return the output of the controller."""
        return self.output.read_text()
