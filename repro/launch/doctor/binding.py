"""Whether SLURM shows a task only some of its node's GPUs, so that NCCL may not reach the others by CUDA IPC."""

from __future__ import annotations

import re
from collections.abc import Mapping

from repro.launch.doctor.check import LIMITED, Check

_OPTIONS = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")
"""Of sbatch and srun; a task has each in its environment too (`SLURM_GPUS_PER_TASK`)."""
_MEANING = (
    "NCCL may lose CUDA IPC inside a node and copy through host memory: ask for gpus-per-node and gpu-bind=none, "
    "and each rank takes its GPU"
)


def of_options(options: Mapping[str, str], gpus: int) -> list[Check]:
    """Of a profile's `options` for nodes of so many GPUs: nothing if all of a node's tasks see all of them."""
    return _bound(options) if gpus > 1 else []


def _bound(options: Mapping[str, str]) -> list[Check]:
    for name in _OPTIONS:
        value = options.get(name, "none")
        if value.rpartition(",")[2] != "none":  # `verbose,none` binds nothing
            found = f"{name} = {value}: a task may see only some of its node's GPUs"
            return [Check("GPU binding", LIMITED, found, _MEANING)]
    return []


def of_task(environment: Mapping[str, str], visible: int) -> list[Check]:
    """Of the task that asks, to which `visible` GPUs are: nothing if it is its node's only one, with its only GPU."""
    if visible != 1:
        return []
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit() and int(on_node) > 1:
        found = f"1 of the job's {on_node} GPUs on this node is visible"
        return [Check("GPU binding", LIMITED, found, _MEANING)]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    if re.fullmatch(r"1(\(x\d+\))?", tasks):  # `8(x2),4` are two nodes of 8 tasks and one of 4
        return []
    variables = {name: f"SLURM_{name.upper().replace('-', '_')}" for name in _OPTIONS}
    return _bound({name: environment[key] for name, key in variables.items() if key in environment})
