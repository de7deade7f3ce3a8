"""A fake SLURM cluster, whose commands answer but run no job, and `repro` commands on it."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
from tests.launch.slurm import fake_slurm

PARTITIONS = [
    "debug*|up|2:00:00|4|gpu:v100:16|96",
    "short|up|10:00|3|gpu:v100:16|96",
    "old|down|infinite|4|gpu:k80:4|16",
]

EVERY_KEY = """
system = "dgx2"
[slurm]
partition = "gpu"
account = "lab"
qos = "long"
constraint = "nvlink"
exclude = ["n3", "n[7-8]"]
gpus_per_node = 16
gpu_type = "v100"
gpu_request = "gres"
cpus_per_task = 6
memory = "0"
time_limit = "01:30:00"
signal_delay_s = 120
options = { reservation = "bench" }
[environment]
modules = ["cuda/12.6"]
setup = ["source /shared/venv/bin/activate"]
python = "/opt/my python"
container = "image.sqsh"
container_mounts = "/data"
variables = { NCCL_IB_HCA = "mlx5" }
[[case]]
match = "*-1t"
nodes = 4
partition = "wide"
time_limit = "1-01:00:00"
"""
"""A profile that sets every key which becomes an option of `sbatch` or `srun`."""


class FakeSlurm:
    """The state file of the fake SLURM commands."""

    def __init__(self, folder: Path):
        self.path = folder / "slurm.json"
        start = {"next": 12, "calls": [], "scripts": {}, "jobs": {}, "partitions": PARTITIONS}
        self.path.write_text(json.dumps({**start, "accounting": True, "refuse_after": None}))

    @property
    def state(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.path.read_text())
        return document

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of every call of a command."""
        return [call[1:] for call in self.state["calls"] if call[0] == name]

    def set(self, **values: Any) -> None:
        """Change the answers of the commands."""
        self.path.write_text(json.dumps(self.state | values))

    def job(self, element: str, **values: Any) -> None:
        """Change the state of one job."""
        state = self.state
        state["jobs"][element] |= values
        self.path.write_text(json.dumps(state))


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

    def row(self, name: str, *keys: str) -> tuple[Any, ...]:
        """Return values, by default state and detail, of the row of a case in `repro status`."""
        return tuple(self.status()[name][key] for key in keys or ("state", "detail"))


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


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put fake SLURM commands first on the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in fake_slurm.COMMANDS:
        program = commands / name
        # -S and -E shorten the start of the interpreter.
        program.write_text(f"#!{sys.executable} -SE\n" + Path(fake_slurm.__file__).read_text())
        program.chmod(0o755)
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(fake.path))
    return fake


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Write a profile for processor cores with two ranks per node."""
    path = tmp_path / "site.toml"
    path.write_text(
        '[slurm]\npartition = "debug"\ntasks_per_node = 2\ntime_limit = "00:30:00"\nexclusive = false\n'
    )
    return path


@pytest.fixture
def commands(site: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> SiteCommands:
    """Return the `repro` commands with the profile `site` on the fake cluster."""
    return SiteCommands(site, slurm, capsys)


@pytest.fixture
def submitted(site: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> ThreeCases:
    """Submit three cases to the fake cluster."""
    return ThreeCases(site, slurm, capsys)
