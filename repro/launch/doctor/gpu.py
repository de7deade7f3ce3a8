"""What `repro doctor` says of GPUs and of this torch on them; as a program, what `make test-gpu` asks first."""

from __future__ import annotations

import os
import sys
from typing import Any

from repro.config.engines import FUSED_HEAD_MULTIPLE
from repro.launch.doctor import binding
from repro.launch.doctor.check import NO, YES, Check
from repro.measure.provenance import gpus
from repro.util import units

NO_DEVICE = "no NVIDIA GPU or driver found"


def devices(torch: Any) -> list[Check]:
    """CUDA, then each GPU that torch sees."""
    if reason := _no_cuda(torch):
        without = "claims that need a GPU stay `not run`"
        return [Check("CUDA", NO, reason, without if reason == NO_DEVICE else f"{without}; {_other_torch()}")]
    in_machine = gpus()
    driver = in_machine[0]["driver"] if in_machine else "unknown"
    count = torch.cuda.device_count()
    ranks = (
        "one rank each: ZeRO, data and tensor parallelism" if count > 1 else "one rank: single-device runs"
    )
    checks = [Check("CUDA", YES, f"{count} device{'s' if count > 1 else ''}, driver {driver}", ranks)]
    checks += binding.of_task(os.environ, count)
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        text = (
            f"{properties.name}, {units.size(properties.total_memory)}, compute capability "
            f"{capability[0]}.{capability[1]}"
        )
        lacking = _no_kernels(torch, capability)
        checks.append(Check(f"cuda:{index}", NO if lacking else YES, text, lacking or precisions(capability)))
    return checks


def unusable(torch: Any) -> str:
    """Why this torch runs nothing on a GPU of this machine, and what to do, in one line; empty if it does on all."""
    if reason := _no_cuda(torch):
        return reason if reason == NO_DEVICE else f"{reason}; {_other_torch()}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if lacking := _no_kernels(torch, (properties.major, properties.minor)):
            built = ", ".join(torch.cuda.get_arch_list())
            return f"{properties.name}: {lacking}; torch {torch.__version__} is built for {built}"
    return ""


def _no_cuda(torch: Any) -> str:
    """Why torch sees no GPU; empty if it sees one."""
    if torch.cuda.is_available():
        return ""
    if not (in_machine := gpus()):
        return NO_DEVICE
    names = ", ".join(sorted({str(gpu["name"]) for gpu in in_machine}))
    if not torch.version.cuda:
        return f"{names} in the machine, but torch {torch.__version__} has no CUDA"
    return f"{names} in the machine, but torch cannot use it (driver too old, or CUDA_VISIBLE_DEVICES?)"


def _other_torch() -> str:
    return "`make KEEP_TORCH=1` uses the machine's own torch, PYTHON= says whose"


def _no_kernels(torch: Any, capability: tuple[int, int]) -> str:
    """What this torch lacks for such a GPU; empty if nothing."""
    if runs_on(capability, torch.cuda.get_arch_list()):
        return ""
    older = "; builds for CUDA 12.6 still do" if capability[0] < 8 else ""
    return f"this torch holds no kernels for sm_{capability[0]}{capability[1]}{older}"


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch built for `architectures` (`sm_70`, `compute_90`) runs on a device.

    Machine code runs within a major version on the same or a later minor one; intermediate code
    (`compute_`) on anything later.  An empty list tells nothing, and is believed to work.
    """
    if not architectures:
        return True
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = "".join(character for character in digits if character.isdigit())
        if not digits:
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and built <= capability:
            return True
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def precisions(capability: tuple[int, int]) -> str:
    """Which training precisions a device really has.  torch's own answer counts emulated bf16 as support."""
    if capability >= (8, 0):
        return "fp32, fp16 and bf16 by tensor cores"
    if capability >= (7, 0):
        heads = f"fused attention in fp16 for heads of a multiple of {FUSED_HEAD_MULTIPLE}"
        return (
            f"fp32 and fp16 (with loss scaling) by tensor cores; no bf16, although torch emulates it; {heads}"
        )
    return "fp32; fp16 without tensor cores, slow; no bf16"


if __name__ == "__main__":
    import torch as here

    sys.exit(f"error: {reason}" if (reason := unusable(here)) else 0)
