"""Checks of GPUs, of their support in the installed torch, and of their binding to SLURM tasks.

As a program, the module prints why torch cannot use the GPUs; `make test-gpu` runs it first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from repro.config import words
from repro.config.engines import FUSED_HEAD_MULTIPLE
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.measure.provenance import gpus
from repro.util import units

NO_GPU_REASON = "no NVIDIA GPU or driver found"
_OTHER_TORCH_HINT = "`make KEEP_TORCH=1` uses the machine's own torch, PYTHON= says whose"
_BINDING_OPTIONS = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")
"""Options of sbatch and srun that bind GPUs; a task has them in its environment (`SLURM_GPUS_PER_TASK`)."""
_BINDING_MEANING = (
    "NCCL may lose CUDA IPC inside a node and copy through host memory: ask for gpus-per-node and gpu-bind=none, "
    "and each rank takes its GPU"
)


def check_gpus(torch: Any) -> list[Check]:
    """Check CUDA, then each GPU that torch sees."""
    if reason := _missing_cuda_reason(torch):
        without = "claims that need a GPU stay `not run`"
        hint = "" if reason == NO_GPU_REASON else f"; {_OTHER_TORCH_HINT}"
        return [Check("CUDA", NO, reason, f"{without}{hint}")]
    in_machine = gpus()
    driver = in_machine[0]["driver"] if in_machine else "unknown"
    count = torch.cuda.device_count()
    several, one = "one rank each: ZeRO, data and tensor parallelism", "one rank: single-device runs"
    found = f"{words.count_noun(count, 'device')}, driver {driver}"
    checks = [Check("CUDA", YES, found, several if count > 1 else one)]
    checks += check_task_binding(os.environ, count)
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        capability = (device.major, device.minor)
        text = f"{device.name}, {units.size(device.total_memory)}, compute capability "
        text += f"{device.major}.{device.minor}"
        lacking = _missing_kernels_reason(torch, capability)
        enables = lacking or supported_precisions(capability)
        checks.append(Check(f"cuda:{index}", NO if lacking else YES, text, enables))
    return checks


def unusable_reason(torch: Any) -> str:
    """Return in one line why this torch cannot use a GPU of this machine, with advice; empty if it can use all."""
    if reason := _missing_cuda_reason(torch):
        return reason if reason == NO_GPU_REASON else f"{reason}; {_OTHER_TORCH_HINT}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if lacking := _missing_kernels_reason(torch, (properties.major, properties.minor)):
            built = ", ".join(torch.cuda.get_arch_list())
            return f"{properties.name}: {lacking}; torch {torch.__version__} is built for {built}"
    return ""


def _missing_cuda_reason(torch: Any) -> str:
    """Return why torch sees no GPU; empty if it sees one."""
    if torch.cuda.is_available():
        return ""
    if not (in_machine := gpus()):
        return NO_GPU_REASON
    names = ", ".join(sorted({str(gpu["name"]) for gpu in in_machine}))
    if not torch.version.cuda:
        return f"{names} in the machine, but torch {torch.__version__} has no CUDA"
    return f"{names} in the machine, but torch cannot use it (driver too old, or CUDA_VISIBLE_DEVICES?)"


def _missing_kernels_reason(torch: Any, capability: tuple[int, int]) -> str:
    """Return the missing kernels of this torch for a GPU; empty if there are none."""
    if has_kernels_for(capability, torch.cuda.get_arch_list()):
        return ""
    older = "; builds for CUDA 12.6 still do" if capability[0] < 8 else ""
    return f"this torch holds no kernels for sm_{capability[0]}{capability[1]}{older}"


def has_kernels_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return whether a torch built for `architectures` (`sm_70`, `compute_90`) runs on a device.

    Machine code runs on the same major version with the same or a later minor version. Intermediate code
    (`compute_`) runs on all later devices. An empty list counts as support.
    """
    parts = (re.match(r"(sm|compute)_(\d+)(\d)", architecture) for architecture in architectures)
    built = [(found[1], int(found[2]), int(found[3])) for found in parts if found]
    return not architectures or any(
        (major, minor) <= capability and (kind == "compute" or major == capability[0])
        for kind, major, minor in built
    )


def supported_precisions(capability: tuple[int, int]) -> str:
    """Describe the training precisions of a device. torch itself counts emulated bf16 as support."""
    if capability >= (8, 0):
        return "fp32, fp16 and bf16 by tensor cores"
    if capability >= (7, 0):
        heads = f"fused attention in fp16 for heads of a multiple of {FUSED_HEAD_MULTIPLE}"
        no_bf16 = "no bf16, although torch emulates it"
        return f"fp32 and fp16 (with loss scaling) by tensor cores; {no_bf16}; {heads}"
    return "fp32; fp16 without tensor cores, slow; no bf16"


def check_profile_binding(options: Mapping[str, str], gpus: int) -> list[Check]:
    """Check a profile's `options` for nodes with `gpus` GPUs; no result if every task sees all GPUs of its node."""
    return _check_binding(options) if gpus > 1 else []


def _check_binding(options: Mapping[str, str]) -> list[Check]:
    for name in _BINDING_OPTIONS:
        value = options.get(name, "none")
        if value.rpartition(",")[2] != "none":  # `verbose,none` binds nothing
            found = f"{name} = {value}: a task may see only some of its node's GPUs"
            return [Check("GPU binding", LIMITED, found, _BINDING_MEANING)]
    return []


def check_task_binding(environment: Mapping[str, str], visible: int) -> list[Check]:
    """Check this task, which sees `visible` GPUs; no result for the only task of a node with one GPU."""
    if visible != 1:
        return []
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit() and int(on_node) > 1:
        found = f"1 of the job's {on_node} GPUs on this node is visible"
        return [Check("GPU binding", LIMITED, found, _BINDING_MEANING)]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    if re.fullmatch(r"1(\(x\d+\))?", tasks):  # `8(x2),4` are two nodes of 8 tasks and one of 4
        return []
    variables = {name: f"SLURM_{name.upper().replace('-', '_')}" for name in _BINDING_OPTIONS}
    return _check_binding({name: environment[key] for name, key in variables.items() if key in environment})


if __name__ == "__main__":
    import torch as here

    sys.exit(f"error: {reason}" if (reason := unusable_reason(here)) else 0)
