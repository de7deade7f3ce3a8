"""A user's folder on the lab: a suite, a profile, a store, and the commands on them."""

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

OPEN = {"pending", "running", "requeued"}
STAND_IN, HELD = "tests.launch.fake_session:run_rank", "tests.launch.held_session:run_rank"
STEP = 'model = "tiny-parity"\ntraining = {{ steps = {steps}, untimed_steps = 1, seed = {seed} }}\n'


def case(name: str, layout: str, *, steps: int = 4, seed: int = 1234, more: str = "") -> str:
    """An experiment's table: `layout` as "dp = 2, zero = 1", on tiny-parity."""
    body = STEP.format(steps=steps, seed=seed)
    return f'[[experiment]]\nname = "{name}"\nlayout = {{ {layout} }}\n{body}{more}\n'


@dataclass
class Bench:
    """One store with suites that are submitted to `lab` with a profile of its own."""

    lab: Lab
    folder: Path
    slurm: dict[str, Any] = field(default_factory=dict)
    """Keys of the profile's [slurm] that differ from: debug, 1 task a node, an hour, 4 at once."""
    spread: dict[str, int] = field(default_factory=dict)
    """Nodes by glob of names."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment of the ranks, by the profile."""
    target: str = STAND_IN
    """What a rank runs: stand-ins without torch, which take a tenth of the time; real ones that wait on request
    (`HELD`); or real ones as they are (empty)."""

    system: str = "local"
    """What the profile takes the nodes for."""

    def __post_init__(self) -> None:
        for name in ("ring", "hold"):
            (self.folder / name).mkdir(exist_ok=True)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def profile(self) -> Path:
        settings = {
            "partition": "debug",
            "tasks_per_node": 1,
            "cpus_per_task": 1,
            "exclusive": False,
            "time_limit": "01:00:00",
            "array_parallelism": 4,
        } | self.slurm
        lines = [f'system = "{self.system}"', "[slurm]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        variables = {"OMP_NUM_THREADS": "1"} | self.variables
        named = ", ".join(f'{key} = "{value}"' for key, value in variables.items())
        lines += ["[environment]", 'interface = "eth0"', f"variables = {{ {named} }}"]
        for match, nodes in self.spread.items():
            lines += ["[[case]]", f'match = "{match}"', f"nodes = {nodes}"]
        path = self.folder / "profile.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def suite(self, *tables: str, name: str = "suite") -> Path:
        """A suite's file with these experiments."""
        path = self.folder / f"{name}.toml"
        path.write_text(f'[suite]\nname = "{name}"\ndescription = "For a test"\n\n' + "\n".join(tables))
        return path

    def repro(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of the user, on this store."""
        return self.lab.run([*self.shell(), "repro", *arguments, "--results", self.results], check=check)

    def shell(self) -> list[str]:
        """What a command starts with, so that jobs that it submits have the ranks that this bench wants."""
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
        """Have the ranks of case `name` stay in a step: stand-ins in the second, real ones in step `HELD` of theirs."""
        (self.folder / "hold" / name).touch()

    def release(self, name: str) -> None:
        (self.folder / "hold" / name).unlink()

    def begun(self) -> list[str]:
        """Cases that stand-ins have begun, in order."""
        log = self.folder / "begun"
        return log.read_text().split() if log.exists() else []

    def submit(self, suite: Path, *options: str) -> dict[str, Any]:
        done = self.repro("submit", suite, "--profile", self.profile, "--json", *options)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def refused(self, suite: Path) -> str:
        """The one line with which `submit` says no."""
        done = self.repro("submit", suite, "--profile", self.profile, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr.strip()

    def status(self) -> dict[str, dict[str, Any]]:
        """What `repro status --json` says of each case."""
        done = self.repro("status", "--json", check=False)
        assert done.returncode in (0, 1, 3), done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["cases"]}

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.status().items()}

    def running_step(self, name: str, step: int = 1) -> None:
        """Wait until case `name` has trained for `step` steps, as its allocation writes."""

        def there() -> bool:
            for state in self.bundles():
                current = state.get("current") or {}
                if name in current.get("names", ()) and current.get("step", 0) >= step:
                    return True
            return False

        self.lab.wait_for(f"step {step} of {name}", there)

    def bundles(self) -> list[dict[str, Any]]:
        """What allocations have written about themselves."""
        return [json.loads(path.read_text()) for path in sorted(self.results.glob("jobs/*/bundle-*.json"))]

    def ended(self, names: Iterable[str] = (), timeout: float = 300) -> dict[str, dict[str, Any]]:
        """Wait until no case, or none of `names`, is open; the status then."""

        def closed() -> dict[str, dict[str, Any]]:
            if not names and self.lab.jobs():  # cheaper than to ask `repro status`
                return {}
            status = self.status()
            chosen = set(names) or set(status)
            return {} if any(status[name]["state"] in OPEN for name in chosen) else status

        return self.lab.wait_for(f"the end of {', '.join(names) or 'all cases'}", closed, timeout, 0.5)

    def records(self) -> list[dict[str, Any]]:
        """Everything in the store."""
        return lines(self.results)

    def latest(self) -> dict[str, dict[str, Any]]:
        """The newest record of every experiment by name."""
        return {record["name"]: record for record in latest(self.results).values()}

    def losses(self) -> dict[str, list[float]]:
        """Losses of all steps by experiment."""
        return {name: record["series"]["loss"] for name, record in self.latest().items()}

    def outcomes(self, name: str) -> list[str]:
        """Every outcome that was recorded of an experiment, oldest first."""
        return [record["outcome"] for record in self.records() if record["name"] == name]

    def logs(self) -> str:
        """What submitit and the jobs around the ranks wrote: for the message of a failed test."""
        paths = sorted(self.results.glob("jobs/*/submitit/*log*"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def ranks(lab: Lab, word: str = "repro.launch.rank.program") -> list[tuple[int, str]]:
    """Processes of ranks on all nodes, which share this machine: (pid, host name of the node)."""
    return [(pid, environment["SLURMD_NODENAME"]) for pid, environment in environments(lab, word)]


def environments(lab: Lab, word: str = "repro.launch.rank.program") -> list[tuple[int, dict[str, str]]]:
    """The same processes, with what each has in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if word not in command or int(process.name) == os.getpid():
                continue
            text = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        ours = (
            variables.get("SLURM_CONF") == f"{lab.folder}/etc/slurm.conf"
        )  # no other lab's, nor a real cluster's
        if ours and "SLURMD_NODENAME" in variables:
            found.append((int(process.name), variables))
    return found
