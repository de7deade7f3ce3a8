"""Fixtures of a fake SLURM cluster, whose commands answer but run no job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm import fake_slurm
from tests.launch.slurm.submitted import SiteCommands, ThreeCases

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
        start: dict[str, Any] = {
            "next": 12,
            "calls": [],
            "scripts": {},
            "jobs": {},
            "partitions": PARTITIONS,
            "accounting": True,
            "refuse_after": None,
        }
        self.path.write_text(json.dumps(start))

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
