"""Whether SLURM shows each task only its own GPU, so that NCCL may not reach the others of the node by CUDA IPC."""

from __future__ import annotations

from collections.abc import Mapping

from repro.doctor.check import LIMITED, Check

_OPTIONS = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")
"""Of sbatch and srun; a task has each in its environment too (`SLURM_GPUS_PER_TASK`)."""
_MEANING = (
    "NCCL may lose CUDA IPC inside a node and copy through host memory: ask for gpus-per-node and gpu-bind=none, "
    "and each rank takes its GPU"
)


def of_options(options: Mapping[str, str]) -> list[Check]:
    """Of a profile's `options`: nothing if all of a node's tasks see all of its GPUs."""
    for name in _OPTIONS:
        value = options.get(name, "none")
        if value.rpartition(",")[2] != "none":  # `verbose,none` binds nothing
            return [
                Check("GPU binding", LIMITED, f"{name} = {value}: a task sees only its own GPU", _MEANING)
            ]
    return []


def of_task(environment: Mapping[str, str], visible: int) -> list[Check]:
    """Of the task that asks, to which `visible` GPUs are."""
    if visible != 1:
        return []
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit() and int(on_node) > 1:
        return [
            Check("GPU binding", LIMITED, f"1 of the job's {on_node} GPUs on this node is visible", _MEANING)
        ]
    variables = {name: f"SLURM_{name.upper().replace('-', '_')}" for name in _OPTIONS}
    return of_options({name: environment[key] for name, key in variables.items() if key in environment})
