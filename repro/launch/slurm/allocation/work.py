"""What one submission has to do, as a file beside it: an allocation never reads a suite that was edited since.

A bundle is what one element of a job array does in its allocation: tasks of equal world, one after another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.config import Experiment, from_dict
from repro.config.suites import Comparison, Entry, Suite
from repro.launch.plan import Task
from repro.util.files import write_json

FILE = "work.json"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Tasks that share one allocation; every experiment in them has the same world."""

    index: int
    """Its place in `Work.bundles`, over all arrays of the submission."""
    tasks: tuple[Task, ...]

    @property
    def experiments(self) -> list[Experiment]:
        """All experiments, in the order in which they run."""
        return [experiment for task in self.tasks for experiment in task.experiments]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tasks[0].experiments[0].layout.world


@dataclass(frozen=True, kw_only=True)
class SubmissionWork:
    """The bundles of a submission and the part of the suite that recording needs."""

    suite: Suite
    """Name, file and entries (experiment, expected outcome) of what was submitted."""
    bundles: tuple[Bundle, ...]
    rerun: bool
    """Whether experiments run although the store knows them."""

    def save(self, folder: Path) -> None:
        """Write it to `folder`; `load` is the way back."""
        entries = [
            {"experiment": entry.experiment.as_dict(), "expect": entry.expect} for entry in self.suite.entries
        ]
        document = {
            "suite": {"name": self.suite.name, "file": self.suite.file, "entries": entries},
            "bundles": [[_task(task) for task in bundle.tasks] for bundle in self.bundles],
            "rerun": self.rerun,
        }
        write_json(folder / FILE, document)

    @staticmethod
    def load(folder: Path) -> SubmissionWork:
        """What `save` wrote to `folder`."""
        document = json.loads((folder / FILE).read_text(encoding="utf-8"))
        suite = document["suite"]
        entries = tuple(
            Entry(experiment=from_dict(row["experiment"]), expect=row["expect"]) for row in suite["entries"]
        )
        known = {entry.experiment.name: entry.experiment for entry in entries}
        bundles = tuple(
            Bundle(index=index, tasks=tuple(_task_from(row, known) for row in rows))
            for index, rows in enumerate(document["bundles"])
        )
        named = Suite(name=suite["name"], file=suite["file"], entries=entries)
        return SubmissionWork(suite=named, bundles=bundles, rerun=document["rerun"])


def _task(task: Task) -> dict[str, Any]:
    comparison = task.comparison
    compare = comparison and {
        "baseline": comparison.baseline,
        "subjects": list(comparison.subjects),
        "rounds": comparison.rounds,
        "apart": comparison.apart,
    }
    return {"experiments": [experiment.name for experiment in task.experiments], "compare": compare}


def _task_from(row: dict[str, Any], known: dict[str, Experiment]) -> Task:
    compare = row["compare"]
    comparison = compare and Comparison(**{**compare, "subjects": tuple(compare["subjects"])})
    return Task(experiments=tuple(known[name] for name in row["experiments"]), comparison=comparison)
