"""A job step: tasks that SLURM places, starts, signals and reaps on the nodes of this job, by `srun --overlap`.

Steps overlap, so that the controller, which is also a task, takes no core or GPU from the ranks.  A step on an
unreachable node then does not block the next step on other nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from repro.launch.slurm.profile import Profile

SLURMCTLD_TIMEOUT_S = 600.0
_UNREACHABLE = "Unable to contact slurm controller"
_CONTROLLER_VARIABLES = (
    *("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
    *("SLURM_DISTRIBUTION", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_WAIT", "SLURM_OVERLAP"),
)
"""Prefixes of variables of the controller's own step that srun would read as options of the next step."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Nodes of this job, and the settings of steps on them."""

    nodes: int
    per_node: int
    """Ranks of a node."""
    site: Profile
    address: str
    """Address of the first node, where the controller and rank 0 are."""
    umask: int

    @property
    def tasks(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nodes * self.per_node

    def step(self, tasks: int, module: str, folder: Path) -> SrunStep:
        """Start `python -m MODULE FOLDER` in `tasks` tasks, neighbours on one node; srun's errors go to `folder`."""
        command = srun_command(self.site, tasks, self.per_node, [module, str(folder)])
        return SrunStep(command, folder / "srun.err")


def srun_command(site: Profile, tasks: int, per_node: int, module: list[str]) -> list[str]:
    """Return the full command line of the step."""
    environment = site.environment
    wanted = {
        "relative": "0",  # from the first node, where the controller is
        "nodes": str(-(-tasks // per_node)),
        "ntasks": str(tasks),
        # Neighbours by rank share a node, in any distribution of the site: layouts rely on this.
        "distribution": f"plane={per_node}",
        # The supervisor judges the end of a launch: after a failure the other ranks may still report.
        "kill-on-bad-exit": "0",
        "wait": "0",
        "cpus-per-task": str(site.slurm.cpus_per_task or ""),
        "container-image": environment.container,
        "container-mounts": environment.container_mounts,
    }
    options = [f"--{key}={value}" for key, value in wanted.items() if value]
    return ["srun", "--overlap", *options, environment.python or sys.executable, "-m", *module]


class SrunStep:
    """One `srun` process, a child of this process."""

    def __init__(self, command: list[str], errors: Path):
        self._command, self._errors = command, errors
        self.starts = 0
        """Number of starts of srun, which restarts for `SLURMCTLD_TIMEOUT_S` while slurmctld does not answer."""
        self._until = time.monotonic() + SLURMCTLD_TIMEOUT_S
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        own = {key: v for key, v in os.environ.items() if not key.startswith(_CONTROLLER_VARIABLES)}
        with open(self._errors, "wb") as file:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=own,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Return the worst exit code of the tasks; None while a task runs or has not started."""
        code = self._process.poll()
        if code and time.monotonic() < self._until and _UNREACHABLE in self._words():
            self._process = self._start()
            return None
        return code

    def signal(self, number: int) -> None:
        """Send `SIGUSR1` or `SIGUSR2` to all tasks: srun forwards these signals to the nodes."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, seconds: float) -> None:
        """Wait for the end of all tasks; after `seconds` srun is killed, and SLURM kills the reachable tasks."""
        self._until = 0.0
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_error_line(self) -> str:
        """Return the last line of srun and its tasks on standard error."""
        lines = self._words().strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _words(self) -> str:
        try:
            return self._errors.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
