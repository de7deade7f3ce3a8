"""Commands on a fake cluster, and a submission of three cases whose states a test chooses."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from repro import cli
from repro.config import Experiment, suites
from repro.launch import plan
from repro.launch.slurm import profile
from repro.launch.slurm.allocation.bundle import SubmissionWork
from repro.launch.slurm.case_states import Registry, Submission, SubmittedArray
from repro.launch.slurm.submission.job_array import pack_arrays
from repro.results.measured import experiment_record
from repro.results.store import Store
from repro.util.files import write_json
from tests.launch.runs import experiments, write_suite

if TYPE_CHECKING:
    from tests.launch.slurm.conftest import FakeSlurm


JOB = {"state": "RUNNING", "reason": "None", "nodes": "n1", "exit": "0:0"}


class SiteCommands:
    """`repro` commands with one store and one profile on a fake cluster."""

    def __init__(self, site: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
        self.results, self.profile, self.slurm, self.capsys = site.parent / "results", site, slurm, capsys

    def suite(self, body: str) -> Path:
        return write_suite(self.profile.parent, body)

    def repro(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, standard output and standard error."""
        self.capsys.readouterr()
        code = cli.main([*arguments, "--results", str(self.results)])
        return (code, *self.capsys.readouterr())

    def submit(self, suite: Path, *options: str) -> tuple[int, str, str]:
        return self.repro("submit", str(suite), "--profile", str(self.profile), *options)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `repro status` by case."""
        return {case["name"]: case for case in json.loads(self.repro("status", "--json")[1])["cases"]}


class ThreeCases(SiteCommands):
    """A suite with the cases a, b, c as elements 12_0 to 12_2, written as `repro submit` writes it."""

    def __init__(self, site: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
        super().__init__(site, slurm, capsys)
        suite = suites.load_suite(self.suite(experiments("a", "b", "c")))
        tasks = plan.plan_tasks(suite, list(suite.entries), Store(self.results), rerun=False)
        (array,) = pack_arrays(tasks, profile.load_profile(site))
        self.registry = Registry(self.results)
        shape: dict[str, Any] = {"nodes": 1, "tasks_per_node": 2, "time_limit_s": 1800, "partition": "debug"}
        row = SubmittedArray(bundles=[0, 1, 2], **shape, job_name="repro-x-0", job_id="12")
        names = {"suite": suite.name, "suite_file": suite.file, "profile": str(site), "system": "local"}
        created = datetime.now(timezone.utc).isoformat()
        self.submission = Submission(id="x", created=created, **names, arrays=[row])
        self.registry.write(self.submission)
        self.folder = self.registry.folder / "x"
        SubmissionWork(suite=suite, bundles=array.bundles, rerun=False).save(self.folder)
        self.experiments = {entry.experiment.name: entry.experiment for entry in suite.entries}
        slurm.set(jobs={f"12_{i}": JOB for i in range(3)})

    def report(self, bundle: int, **state: Any) -> None:
        """Write the progress file of a bundle, as its allocation does."""
        start = {"restarts": 0, "nodes": ["n1"], "current": None, "stopped": None}
        write_json(self.folder / f"bundle-{bundle}.json", start | state)

    def record(self, name: str, outcome: str, reason: str = "") -> Experiment:
        """Append a record of a case, and return its experiment."""
        end: dict[str, Any] = {"suite": "faults", "wall_s": 1.0, "outcome": outcome, "reason": reason}
        with Store(self.results) as store:
            store.append(experiment_record(self.experiments[name], [], provenance={}, **end))
        return self.experiments[name]
