"""Helpers of the SLURM tests: suites, a profile and a store in one folder, and the commands that use them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.records import latest, lines
from tests.slurm_lab.cluster import ROOT, Lab

OPEN_STATES = {"pending", "running", "requeued"}
FAKE_TARGET, HELD_TARGET = "tests.launch.fake_session:run_rank", "tests.launch.held_session:run_rank"
KEYS = 'model = "tiny-parity"\ntraining = {{ steps = {steps}, untimed_steps = 1, seed = {seed} }}\n'


def case(name: str, layout: str, *, steps: int = 4, seed: int = 1234, more: str = "") -> str:
    """Return the table of an experiment with tiny-parity; `layout` is for example "dp = 2, zero = 1"."""
    body = KEYS.format(steps=steps, seed=seed)
    return f'[[experiment]]\nname = "{name}"\nlayout = {{ {layout} }}\n{body}{more}\n'


@dataclass
class Bench:
    """A store, a profile, and suites that are submitted to `lab`."""

    lab: Lab
    folder: Path
    slurm: dict[str, Any] = field(default_factory=dict)
    """Keys of the profile's [slurm] that replace the defaults in `profile`."""
    case_nodes: dict[str, int] = field(default_factory=dict)
    """Number of nodes, by glob pattern of experiment names."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the profile sets for the ranks."""
    target: str = FAKE_TARGET
    """Rank target: `FAKE_TARGET` does not import torch and takes a tenth of the time; `HELD_TARGET` trains and waits
    on request; an empty text is the product's own rank target."""

    system: str = "local"
    """System that the profile names for the nodes."""

    def __post_init__(self) -> None:
        for name in ("ring", "hold"):
            (self.folder / name).mkdir(exist_ok=True)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def profile(self) -> Path:
        settings = {"partition": "debug", "tasks_per_node": 1, "cpus_per_task": 1, "exclusive": False}
        settings |= {"time_limit": "01:00:00", "array_parallelism": 4} | self.slurm
        lines = [f'system = "{self.system}"', "[slurm]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        variables = {"OMP_NUM_THREADS": "1"} | self.variables
        entries = ", ".join(f'{key} = "{value}"' for key, value in variables.items())
        lines += ["[environment]", 'interface = "eth0"', f"variables = {{ {entries} }}"]
        for match, nodes in self.case_nodes.items():
            lines += ["[[case]]", f'match = "{match}"', f"nodes = {nodes}"]
        path = self.folder / "profile.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def suite(self, *tables: str, name: str = "suite") -> Path:
        """Write a suite with these experiments and return its path."""
        path = self.folder / f"{name}.toml"
        path.write_text(f'[suite]\nname = "{name}"\ndescription = "For a test"\n\n' + "\n".join(tables))
        return path

    def repro(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a `repro` command on this store."""
        return self.lab.run([*self.shell(), "repro", *arguments, "--results", self.results], check=check)

    def shell(self) -> list[str]:
        """Return the command prefix that makes submitted jobs start the rank target `self.target`."""
        if not self.target:
            return []
        settings = {
            "REPRO_RANK_TARGET": self.target,
            "PYTHONPATH": str(ROOT),
            "FAKE_RING": str(self.folder / "ring"),
            "FAKE_HOLD": str(self.folder / "hold"),
            "FAKE_LOG": str(self.folder / "begun"),
        }
        return ["env", *(f"{key}={value}" for key, value in settings.items())]

    def hold(self, name: str) -> None:
        """Block the ranks of case `name`: fake ranks in their second step, real ranks in step `held_session.HELD`."""
        (self.folder / "hold" / name).touch()

    def release(self, name: str) -> None:
        (self.folder / "hold" / name).unlink()

    def started_cases(self) -> list[str]:
        """Return the cases that ranks have started, in order."""
        log = self.folder / "begun"
        return log.read_text().split() if log.exists() else []

    def submit(self, suite: Path, *options: str) -> dict[str, Any]:
        done = self.repro("submit", suite, "--profile", self.profile, "--json", *options)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def submit_error(self, suite: Path) -> str:
        """Return the one-line error with which `repro submit` refuses the suite."""
        done = self.repro("submit", suite, "--profile", self.profile, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr.strip()

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the row of each case in `repro status --json`."""
        done = self.repro("status", "--json", check=False)
        assert done.returncode in (0, 1, 3), done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["cases"]}

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.status().items()}

    def wait_for_step(self, name: str, step: int = 1) -> None:
        """Wait until the allocation of case `name` reports step `step`."""

        def is_reached() -> bool:
            for state in self.bundles():
                current = state.get("current") or {}
                if name in current.get("names", ()) and current.get("step", 0) >= step:
                    return True
            return False

        self.lab.wait_for(f"step {step} of {name}", is_reached)

    def bundles(self) -> list[dict[str, Any]]:
        """Return the state files of all allocations."""
        return [json.loads(path.read_text()) for path in sorted(self.results.glob("jobs/*/bundle-*.json"))]

    def wait_for_end(self, names: Iterable[str] = (), timeout: float = 300) -> dict[str, dict[str, Any]]:
        """Wait until no case, or no case of `names`, is open; return the status."""

        def closed() -> dict[str, dict[str, Any]]:
            if not names and self.lab.jobs():  # cheaper than `repro status`
                return {}
            status = self.status()
            chosen = set(names) or set(status)
            return {} if any(status[name]["state"] in OPEN_STATES for name in chosen) else status

        return self.lab.wait_for(f"the end of {', '.join(names) or 'all cases'}", closed, timeout, 0.5)

    def records(self) -> list[dict[str, Any]]:
        """Return all records of the store."""
        return lines(self.results)

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the newest record of each experiment, by name."""
        return {record["name"]: record for record in latest(self.results).values()}

    def losses(self) -> dict[str, list[float]]:
        """Return the losses of all steps, by experiment."""
        return {name: record["series"]["loss"] for name, record in self.latest().items()}

    def outcomes(self, name: str) -> list[str]:
        """Return the recorded outcomes of an experiment, oldest first."""
        return [record["outcome"] for record in self.records() if record["name"] == name]

    def logs(self) -> str:
        """Return the logs of submitit and of the jobs, for the message of a failed test."""
        paths = sorted(self.results.glob("jobs/*/submitit/*log*"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def ranks(lab: Lab, word: str = "repro.launch.rank.program") -> list[tuple[int, str]]:
    """Return (pid, node name) of the rank processes of all nodes; all nodes share this machine."""
    return [(pid, environment["SLURMD_NODENAME"]) for pid, environment in environments(lab, word)]


def environments(lab: Lab, word: str = "repro.launch.rank.program") -> list[tuple[int, dict[str, str]]]:
    """Return (pid, environment) of the rank processes of all nodes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if word not in command or int(process.name) == os.getpid():
                continue
            text = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:  # the process has ended
            continue
        variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        # Another lab or a real cluster has another SLURM_CONF.
        is_of_lab = variables.get("SLURM_CONF") == f"{lab.folder}/etc/slurm.conf"
        if is_of_lab and "SLURMD_NODENAME" in variables:
            found.append((int(process.name), variables))
    return found
