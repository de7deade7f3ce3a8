"""Bundles of experiments that share one SLURM job, the work file of a submission, and the progress file of a bundle.

`repro submit` writes the work file, so that a later edit of the suite does not change a job that waits. `repro status`
reads the progress file.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro.config import Experiment, from_dict
from repro.config.suites import Comparison, Entry, Suite
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.progress import Progress
from repro.launch.rank_process import Position
from repro.results.store import DISK_FULL
from repro.util.files import read_json, write_json

WORK_FILE = "work.json"
WRITE_INTERVAL_S = 2.0
"""Minimum time between two writes of the current step to the progress file, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Experiments and comparisons that run one after another in one SLURM job, all with the same number of ranks."""

    index: int
    """Index of the bundle (experiments of one SLURM job) in the list of all bundles that `repro submit` submitted."""
    tasks: tuple[Task, ...]

    @property
    def experiments(self) -> list[Experiment]:
        """Return the experiments of a bundle (one SLURM job) in the order in which the job runs them."""
        return [experiment for task in self.tasks for experiment in task.experiments]

    @property
    def world(self) -> int:
        return self.tasks[0].experiments[0].layout.world


@dataclass(frozen=True, kw_only=True)
class SubmissionWork:
    """Content of `work.json`: the experiments of one `repro submit`, and the part of the suite that the jobs need."""

    suite: Suite
    """Suite of the submission with only the entries (experiments and expected outcomes) that `--only` selected."""
    bundles: tuple[Bundle, ...]
    rerun: bool
    """Whether experiments that already have a record run again."""

    def save(self, folder: Path) -> None:
        """Write the file `work.json`, the experiments of one `repro submit` grouped by SLURM job, to `folder`."""
        entries = [{"experiment": e.experiment.as_dict(), "expect": e.expect} for e in self.suite.entries]
        document = {
            "suite": {"name": self.suite.name, "file": self.suite.file, "entries": entries},
            "bundles": [[_task(task) for task in bundle.tasks] for bundle in self.bundles],
            "rerun": self.rerun,
        }
        write_json(folder / WORK_FILE, document)

    @staticmethod
    def load(folder: Path) -> SubmissionWork:
        """Return the content of `work.json` in `folder`: experiments of one `repro submit`, grouped by SLURM job."""
        document = json.loads((folder / WORK_FILE).read_text(encoding="utf-8"))
        suite = document["suite"]
        rows = ((from_dict(row["experiment"]), row["expect"]) for row in suite["entries"])
        entries = tuple(Entry(experiment=experiment, expect=expect) for experiment, expect in rows)
        known = {entry.experiment.name: entry.experiment for entry in entries}
        bundles = tuple(
            Bundle(index=index, tasks=tuple(_task_from(task, known) for task in tasks))
            for index, tasks in enumerate(document["bundles"])
        )
        named = Suite(name=suite["name"], file=suite["file"], entries=entries)
        return SubmissionWork(suite=named, bundles=bundles, rerun=document["rerun"])


def _task(task: Task) -> dict[str, Any]:
    compare = task.comparison and vars(task.comparison)
    return {"experiments": [experiment.name for experiment in task.experiments], "compare": compare}


def _task_from(row: dict[str, Any], known: dict[str, Experiment]) -> Task:
    compare = row["compare"]
    comparison = compare and Comparison(**{**compare, "subjects": tuple(compare["subjects"])})
    return Task(experiments=tuple(known[name] for name in row["experiments"]), comparison=comparison)


class BundleProgress(Progress):
    """Progress file of one bundle (the experiments of one SLURM job), which survives requeues of the job."""

    def __init__(self, folder: Path, bundle: Bundle, job: str, restarts: int):
        self.path = folder / f"bundle-{bundle.index}.json"
        before = read_json(self.path)
        # A requeued job does not repeat the experiments that ended before the requeue.
        ended_rows = [row for row in before.get("ended", []) if row["outcome"] != "interrupted"]
        self.ended_before = {row["name"]: row["outcome"] for row in ended_rows}
        known = len(self.ended_before)
        super().__init__(total=len(bundle.experiments) - known, known=known)
        self._state: dict[str, Any] = {
            "bundle": bundle.index,
            "job": job,
            "restarts": restarts,
            "nodes": [],
            "phase": "starting",
            "current": None,
            "ended": ended_rows,
            "stopped": None,
        }
        self.write()

    def remaining(self, tasks: tuple[Task, ...]) -> list[Task]:
        """Return tasks for those experiments of `tasks` that had not ended when SLURM last requeued their job."""
        return [rest for task in tasks for rest in _remaining_tasks(task, self.ended_before)]

    @property
    def open(self) -> int:
        """Return the number of experiments of this SLURM job that have no outcome yet."""
        return self.total - self.done

    def count_outcomes(self) -> dict[str, int]:
        """Return the number of ended experiments for each outcome."""
        return dict(Counter(row["outcome"] for row in self._state["ended"]))

    def set_nodes(self, nodes: list[str]) -> None:
        """Write the names of the allocated nodes to the progress file, after all nodes have reported."""
        self._state |= {"nodes": nodes, "phase": "running"}
        self.write()

    def launch(self, job: Job) -> None:
        """Write the start of a launch, with the names of its experiments, to the progress file."""
        super().launch(job)
        experiments = job.experiments
        self._state["current"] = {
            "names": [experiment.name for experiment in experiments],
            "case": experiments[0].name,
            "compare": job.compare,
            "step": 0,
            "steps": experiments[0].training.steps,
            "phase": "start",
            "steps_per_s": None,
        }
        self.write()

    def tick(self, position: Position) -> None:
        """Write the experiment, step and phase of rank 0 to the progress file, at most every `WRITE_INTERVAL_S`."""
        super().tick(position)
        current, now = self._state["current"], time.monotonic()
        if not position.begun or current is None or self.running is None:
            return
        changed = current["phase"] == "start"
        current["step"], current["phase"] = position.step, position.phase
        now_at = self.running.job.experiments[position.experiment]
        rate = self.running.steps[position.experiment].rate
        current["case"], current["steps"] = now_at.name, now_at.training.steps
        current["steps_per_s"] = None if rate is None else round(rate, 4)
        if changed or now - self._written >= WRITE_INTERVAL_S:
            self.write()

    def ended(self, name: str, outcome: str, reason: str, seconds: float, *, expected: bool) -> None:
        """Write the outcome of an experiment to the progress file."""
        super().ended(name, outcome, reason, seconds, expected=expected)
        self._state["ended"].append({"name": name, "outcome": outcome, "reason": reason})
        if outcome == "interrupted":
            self.done -= 1
        self.write()

    def end(self, *, signal: str = "", reason: str = "") -> None:
        """Write to the progress file that the SLURM job ends. An early end has a `reason`, and perhaps a `signal`."""
        self._state["current"] = None
        self._state["phase"] = "stopped" if reason else "ended"
        self._state["stopped"] = {"signal": signal, "reason": reason} if reason else None
        self.write()

    def write(self) -> None:
        """Write the progress file.  A full disk only prints a warning, because the results are in the store."""
        self._written = time.monotonic()
        written = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            write_json(self.path, {"written": written, **self._state})
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            print(f"disk full: the progress file {self.path} is out of date", file=sys.stderr, flush=True)


def _remaining_tasks(task: Task, ended: dict[str, str]) -> list[Task]:
    """Return tasks for the experiments of `task` without outcome in `ended`, plus the baseline if they are compared."""
    left = tuple(experiment for experiment in task.experiments if experiment.name not in ended)
    if not left or len(left) == len(task.experiments):
        return [task] if left else []
    comparison = task.comparison
    if comparison is None:
        return [Task(experiments=left)]
    baseline = task.experiments[0]
    # The baseline failed, so the other experiments of the comparison run without a baseline.
    if ended.get(baseline.name, "ok") != "ok":
        return [Task(experiments=left)]
    members = left if baseline in left else (baseline, *left)
    return [Task(experiments=members, comparison=comparison)]
