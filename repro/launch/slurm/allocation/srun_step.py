"""Job steps: tasks that `srun --overlap` starts, signals and reaps on the nodes of this SLURM job.

The controller runs in a job step too. With `--overlap`, the controller takes no core or GPU from the ranks' job steps.
A job step that hangs on an unreachable node does not block the next step.
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
"""Prefixes of variables that SLURM sets for the controller's job step, and that a nested srun would read as options."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Nodes of this SLURM job, and the settings of job steps on them."""

    nodes: int
    per_node: int
    """Maximum number of ranks on each node."""
    site: Profile
    address: str
    """IP address of the first node, where the controller and rank 0 run."""
    umask: int

    @property
    def tasks(self) -> int:
        """Return the number of SLURM tasks that the allocation can run at once, one per rank."""
        return self.nodes * self.per_node

    def step(self, tasks: int, module: str, folder: Path) -> SrunStep:
        """Start `python -m MODULE FOLDER` as a job step of `tasks` tasks. Its errors go to a file in `folder`."""
        command = srun_command(self.site, tasks, self.per_node, [module, str(folder)])
        return SrunStep(command, folder / "srun.err")


def srun_command(site: Profile, tasks: int, per_node: int, module: list[str]) -> list[str]:
    """Return the srun command that runs a Python module in `tasks` tasks. `module`: its name, then its arguments."""
    environment = site.environment
    wanted = {
        "relative": "0",  # Rank 0 must run on the first node, which is the node of the controller.
        "nodes": str(-(-tasks // per_node)),
        "ntasks": str(tasks),
        # Consecutive ranks share a node, as layouts assume. A site's default distribution may differ.
        "distribution": f"plane={per_node}",
        # After the failure of one rank, srun must not kill the other ranks, whose reports help to find the cause.
        "kill-on-bad-exit": "0",
        "wait": "0",
        "cpus-per-task": str(site.slurm.cpus_per_task or ""),
        "container-image": environment.container,
        "container-mounts": environment.container_mounts,
    }
    options = [f"--{key}={value}" for key, value in wanted.items() if value]
    return ["srun", "--overlap", *options, environment.python or sys.executable, "-m", *module]


class SrunStep:
    """One running job step, as an `srun` child process of the controller."""

    def __init__(self, command: list[str], errors: Path):
        self._command, self._errors = command, errors
        self.starts = 0
        """Number of starts of srun, which is restarted for `SLURMCTLD_TIMEOUT_S` while slurmctld is unreachable."""
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
        """Return srun's exit code, the highest exit code of its tasks; None while a task runs or has not started."""
        code = self._process.poll()
        if code and time.monotonic() < self._until and _UNREACHABLE in self._words():
            self._process = self._start()
            return None
        return code

    def signal(self, number: int) -> None:
        """Send `SIGUSR1` or `SIGUSR2` to srun, which forwards the signal to all tasks."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, seconds: float) -> None:
        """Wait for the end of the job step. After `seconds`, kill srun, upon which SLURM kills all reachable tasks."""
        self._until = 0.0
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_error_line(self) -> str:
        """Return the last line that srun or one of its tasks wrote to standard error; empty without one."""
        lines = self._words().strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _words(self) -> str:
        try:
            return self._errors.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
