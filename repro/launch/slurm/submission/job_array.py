"""SLURM job arrays of a submission: packing of experiments with equal resources, and the sbatch script of an array."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from repro.config import Experiment
from repro.launch.plan import Task
from repro.launch.slurm.allocation.bundle import Bundle
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.scheduler import parse_time_limit


@dataclass(frozen=True, kw_only=True, order=True)
class ArrayShape:
    """Resources that each element of a job array requests."""

    nodes: int
    tasks_per_node: int
    time_min: float
    partition: str
    requeues: int = 0
    """Maximum number of requeues of an array element that reaches its time limit."""

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """Bundles of experiments with equal resources, which `sbatch` submits as a job array with an element per bundle."""

    shape: ArrayShape
    bundles: tuple[Bundle, ...]

    def node_hours(self) -> float:
        """Return the node-hours of the job array if every element runs up to its time limit."""
        return len(self.bundles) * self.shape.nodes * self.shape.time_min / 60


def count_nodes(world: int, per_node: int, at_least: int = 0) -> int:
    """Return the smallest number of nodes, `at_least` or more, that run `world` ranks with at most `per_node` each.

    Every node gets the same number of ranks, because SLURM starts the same number of tasks on every node.
    """
    least = max(at_least, -(-world // per_node), 1)
    return next(nodes for nodes in range(min(least, world), world + 1) if world % nodes == 0)


def array_shape(experiment: Experiment, profile: Profile) -> ArrayShape:
    """Return the resources that a job array requests for `experiment` on the site of `profile`."""
    case = profile.class_of(experiment.name)
    world = experiment.layout.world
    nodes = count_nodes(world, profile.ranks_per_node, case.nodes)
    return ArrayShape(
        nodes=nodes,
        tasks_per_node=world // nodes,
        time_min=parse_time_limit(case.time_limit or profile.slurm.time_limit),
        partition=case.partition or profile.slurm.partition,
        requeues=profile.slurm.requeues if case.requeues is None else case.requeues,
    )


def pack_arrays(tasks: list[Task], profile: Profile) -> list[JobArray]:
    """Pack experiments and comparisons into job arrays, largest first, because large jobs wait longest for nodes."""
    groups: dict[ArrayShape, list[Task]] = {}
    for task in tasks:
        groups.setdefault(array_shape(task.experiments[0], profile), []).append(task)
    found, indices, size = [], count(), profile.slurm.cases_per_job
    for shape in sorted(groups, reverse=True):
        members = groups[shape]
        chunks = (tuple(members[start : start + size]) for start in range(0, len(members), size))
        bundles = tuple(Bundle(index=next(indices), tasks=chunk) for chunk in chunks)
        found.append(JobArray(shape=shape, bundles=bundles))
    return found


def submitit_parameters(array: JobArray, profile: Profile, job_name: str) -> dict[str, Any]:
    """Return the arguments of submitit's `SlurmExecutor.update_parameters` for `array`."""
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
        "setup": setup_lines(profile),
        # The first job step has one task, the controller, which starts the ranks and reserves no GPU or core.
        "srun_args": ["--nodes=1", "--ntasks=1", "--relative=0", "--overlap"],
        "exclusive": slurm.exclusive,
        # Consecutive ranks share a node, as layouts assume.
        "additional_parameters": {"requeue": True, "distribution": "block", **slurm.options},
    }
    # A job with exclusive nodes requests all GPUs of its nodes. Other jobs request one GPU for each rank.
    wanted |= profile.gpu_request(slurm.gpus_per_node if slurm.exclusive else shape.tasks_per_node)
    return {key: value for key, value in wanted.items() if value not in ("", 0, False, [], None)}


def setup_lines(profile: Profile) -> list[str]:
    """Return the shell lines that a SLURM job runs before its ranks start."""
    environment = profile.environment
    lines = ["umask 077"] if profile.storage.private else []
    lines += [f"module load {shlex.quote(module)}" for module in environment.modules]
    lines += environment.setup
    return lines + [f"export {key}={shlex.quote(value)}" for key, value in environment.variables.items()]


def python_command(profile: Profile) -> str:
    """Return the quoted Python interpreter of a job's controller, which runs outside the container for srun."""
    inside = profile.environment.container
    return shlex.quote(sys.executable if inside else profile.environment.python or sys.executable)


def batch_script(array: JobArray, profile: Profile, job_name: str, folder: Path) -> str:
    """Return the script of a job array that submitit passes to `sbatch`, with log files in `folder`."""
    from submitit.slurm import slurm

    jobs = len(array.bundles) if len(array.bundles) > 1 else None
    command = f"{python_command(profile)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    parameters = submitit_parameters(array, profile, job_name)
    return slurm._make_sbatch_string(command=command, folder=folder, map_count=jobs, **parameters)
