"""The sbatch script of one job array.  submitit writes it; this says what submitit is to write."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from repro.launch.slurm.site.profile import Profile
from repro.launch.slurm.submission.pack import Array


def parameters(array: Array, profile: Profile, job_name: str) -> dict[str, Any]:
    """submitit's parameters (`SlurmExecutor.update_parameters`) for `array`."""
    slurm, shape = profile.slurm, array.shape
    wanted: dict[str, Any] = {
        "job_name": job_name,
        "partition": shape.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": ",".join(slurm.exclude),
        "nodes": shape.nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": slurm.cpus_per_task,
        "mem": slurm.memory,
        "time": max(1, int(shape.time_min)),
        "signal_delay_s": slurm.signal_delay_s,
        "array_parallelism": slurm.array_parallelism,
        "setup": setup(profile),
        # One task, the controller; it starts the ranks, and has no GPU or core for itself.
        "srun_args": ["--nodes=1", "--ntasks=1", "--relative=0", "--overlap"],
        "exclusive": slurm.exclusive,
        # Neighbours by rank share a node: the layout's order says who they are.
        "additional_parameters": {"requeue": True, "distribution": "block", **slurm.options},
    }
    if slurm.gpus_per_node and slurm.gpu_request != "none":
        prefix = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        # Whole nodes where they are exclusive; else what the ranks use.
        gpus = slurm.gpus_per_node if slurm.exclusive else shape.tasks_per_node
        key, value = ("gpus_per_node", f"{prefix}{gpus}")
        if slurm.gpu_request == "gres":
            key, value = "gres", f"gpu:{prefix}{gpus}"
        wanted[key] = value
    return {key: value for key, value in wanted.items() if value not in ("", 0, False, [], None)}


def setup(profile: Profile) -> list[str]:
    """Shell lines before the ranks start."""
    environment = profile.environment
    lines = ["umask 077"] if profile.private else []
    lines += [f"module load {shlex.quote(module)}" for module in environment.modules]
    lines += environment.setup
    return lines + [f"export {key}={shlex.quote(value)}" for key, value in environment.variables.items()]


def python(profile: Profile) -> str:
    """The interpreter of the controller, as a shell word.  A container has no srun: the controller is outside of it."""
    inside = profile.environment.container
    return shlex.quote(sys.executable if inside else profile.environment.python or sys.executable)


def text(array: Array, profile: Profile, job_name: str, folder: Path) -> str:
    """What `sbatch` gets, to the letter, if submitit's folder is `folder`."""
    from submitit.slurm import slurm

    count = len(array.bundles)
    command = f"{python(profile)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return slurm._make_sbatch_string(
        command=command,
        folder=folder,
        map_count=count if count > 1 else None,
        **parameters(array, profile, job_name),
    )
