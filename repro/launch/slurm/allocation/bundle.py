"""How a running bundle stands, as a file that `repro status` reads; the same is said on standard error."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro.launch.heartbeat import Position
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.progress import Progress
from repro.launch.slurm.allocation.work import Bundle
from repro.results.store import DISK_FULL
from repro.util.files import write_json

WRITE_S = 2.0
"""Positions are written at most this often; everything else at once."""


class BundleFile(Progress):
    """Progress of one bundle over all starts of its job."""

    def __init__(self, folder: Path, bundle: Bundle, job: str, restarts: int):
        self.path = folder / f"bundle-{bundle.index}.json"
        before = _read(self.path)
        # What a former start of this job has ended is not begun again, whatever came of it.
        kept = [row for row in before.get("ended", []) if row["outcome"] != "interrupted"]
        self.ended_before = {row["name"]: row["outcome"] for row in kept}
        known = len(self.ended_before)
        super().__init__(total=len(bundle.experiments) - known, known=known)
        self._state: dict[str, Any] = {
            "bundle": bundle.index,
            "job": job,
            "restarts": restarts,
            "nodes": [],
            "phase": "starting",
            "current": None,
            "ended": kept,
            "stopped": None,
        }
        self.write()

    def remaining(self, tasks: tuple[Task, ...]) -> list[Task]:
        """What no former start has ended."""
        return [rest for task in tasks for rest in _rest(task, self.ended_before)]

    @property
    def open(self) -> int:
        """Experiments without an end."""
        return self.total - self.done

    def on(self, nodes: list[str]) -> None:
        """The allocation is complete."""
        self._state |= {"nodes": nodes, "phase": "running"}
        self.write()

    def launch(self, job: Job) -> None:
        """One launch starts."""
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
        """Rank 0 is at `position`."""
        super().tick(position)
        current, now = self._state["current"], time.monotonic()
        if not position.begun or current is None or self.job is None or self.course is None:
            return
        changed = current["phase"] == "start"
        current["step"], current["phase"] = position.step, position.phase
        now_at, rate = self.job.experiments[position.experiment], self.course.steps[position.experiment].rate
        current["case"], current["steps"] = now_at.name, now_at.training.steps
        current["steps_per_s"] = None if rate is None else round(rate, 4)
        if changed or now - self._written >= WRITE_S:
            self.write()

    def ended(self, name: str, outcome: str, reason: str, seconds: float, *, expected: bool) -> None:
        """One experiment has its outcome."""
        super().ended(name, outcome, reason, seconds, expected=expected)
        self._state["ended"].append({"name": name, "outcome": outcome, "reason": reason})
        if outcome == "interrupted":
            self.done -= 1
        self.write()

    def end(self, *, signal: str = "", reason: str = "") -> None:
        """Nothing runs any more; with a `reason`, before all was done."""
        self._state["current"] = None
        self._state["phase"] = "stopped" if reason else "ended"
        self._state["stopped"] = {"signal": signal, "reason": reason} if reason else None
        self.write()

    def write(self) -> None:
        """Write the file.  On a full disk it stays as it was: what counts is in the records."""
        self._written = time.monotonic()
        written = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            write_json(self.path, {"written": written, **self._state})
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            print(f"disk full: {self.path} is not up to date", file=sys.stderr, flush=True)


def _rest(task: Task, ended: dict[str, str]) -> list[Task]:
    """What is left of `task`; a comparison needs its baseline again beside any subject that is left."""
    left = tuple(experiment for experiment in task.experiments if experiment.name not in ended)
    if not left or len(left) == len(task.experiments):
        return [task] if left else []
    comparison = task.comparison
    if comparison is None:
        return [Task(experiments=left)]
    baseline = task.experiments[0]
    outcome = ended.get(baseline.name, "")
    if outcome and outcome != "ok":  # there is nothing to compare with
        return [Task(experiments=left)]
    if baseline in left:
        return [Task(experiments=left, comparison=comparison)]
    return [Task(experiments=(baseline, *left), comparison=comparison)]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def counts(path: Path) -> dict[str, int]:
    """How many experiments of a bundle had which outcome."""
    found: dict[str, int] = {}
    for row in _read(path).get("ended", []):
        found[row["outcome"]] = found.get(row["outcome"], 0) + 1
    return found
