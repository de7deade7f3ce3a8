"""Texts that describe layouts, devices, uncertain inputs and counts in displays."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from repro.config import engines
from repro.config.enums import OperatorSet
from repro.config.layout import Layout
from repro.config.system import System
from repro.util import units

_SWITCHES = {
    "recompute": "recomputation",
    "sp": "sequence parallelism",
    "pa": "P_a",
    "pa_cpu": "P_a+cpu",
    "md": "M_D",
    "offload_optimizer": "optimizer states in host memory",
    "scatter_gather": "scatter/gather",
    "cuda_graphs": "CUDA graphs",
}
_KERNELS = {
    OperatorSet.FUSED_2024: "operators of 2024 (compiled)",
    OperatorSet.MEGATRON_2025: "operators of Megatron-core (2025)",
    OperatorSet.TORCHTITAN_2024: "operators of torchtitan (2024)",
    OperatorSet.FUSED_2026: "operators of 2026 (this suite's kernels)",
    OperatorSet.REFERENCE: "torch's operators in place of this suite's kernels",
    OperatorSet.SOFTMAX: "operators of 2020 (softmax fused)",
    OperatorSet.UNFUSED: "operators of 2019 (unfused)",
}


def describe_layout(spread: Layout, *, degrees: bool = True, batches: bool = False) -> str:
    """Return a description of a layout, `tp 2 x dp 4, ZeRO 1, fp16, recomputation`, without settings at their defaults.

    `degrees`: include the degrees of parallelism and the pipeline schedule; `batches`: include the batch sizes.
    """
    axes = [f"{axis} {size}" for axis in ("tp", "cp", "pp", "dp") if (size := getattr(spread, axis)) > 1]
    parts = [" x ".join(axes) or "one rank"] if degrees else []
    if spread.copies > 1 or spread.zero:
        how = f" by {spread.zero1_reduce}" if spread.zero1_reduce != "reduce-scatter" else ""
        how += " parameter by parameter" if spread.zero3_gather == "parameter" else ""
        parts.append(f"ZeRO {spread.zero}{how}")
    parts.append(spread.precision + (" with fp32 gradients" if spread.grad_dtype == "fp32" else ""))
    if batches:
        parts += [f"micro-batch {spread.micro_batch}", f"global batch {spread.global_batch}"]
    if spread.pp > 1 and degrees:
        parts.append(spread.schedule + (f" with {spread.chunks} chunks" if spread.chunks > 1 else ""))
        if batches:
            parts.append(f"{spread.accumulation} micro-batches per step")
    parts += [
        f"{value} {words}" if isinstance(value, str) else words
        for key, words in _SWITCHES.items()
        if (value := getattr(spread, key))
    ]
    if not spread.cb:
        parts.append("without C_B")
    if not spread.gradient_as_bucket_view:
        parts.append("separate gradient buckets")
    if spread.kernels is not OperatorSet.FUSED:
        parts.append(_KERNELS[spread.kernels])
    if spread.tp > 1 and not spread.tp_overlap:
        parts.append("tp collectives not overlapped")
    if not spread.overlap:
        parts.append("gradients reduced after backward" if spread.zero < 2 else "reductions not overlapped")
    elif not spread.gather_overlap:
        parts.append("parameters gathered before the step")
    return ", ".join(parts)


def layout_options(spread: Layout, precision: str, software: str | None = None) -> str:
    """Return the command-line options that select a layout, without options at their defaults.

    `precision`: the system's default. `software`: value of `--software`, whose settings are then defaults, too.
    """
    found = []
    defaults = {field.name: field.default for field in dataclasses.fields(Layout)} | {"precision": precision}
    if software:
        keys = {"precision": precision} | engines.find_software(software).layout | {"software": software}
        degrees = {key: getattr(spread, key) for key in ("zero", "dp", "cp")}
        defaults |= engines.with_software(keys | degrees) | {"zero": 0, "cp": 1}
    for key, default in defaults.items():
        name, value = key.replace("_", "-"), getattr(spread, key)
        if value != default and key not in ("dp", "stage_layers"):
            switch = f"--{name}" if value else f"--no-{name}"
            joint = "-" if key == "recompute" else " "
            found.append(switch if isinstance(value, bool) else f"--{name}{joint}{value}")
    return " ".join(found)


def describe_input(key: str) -> str:
    """Return words for an uncertain input's key: `inter-node overlap cost` for `links.inter-node.overlap_cost`."""
    return re.sub("[._]", " ", re.sub(r"^(links|device)\.(time\.)?|_s(?= \(|$)", "", key))


def axes(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Return the axes of parallelism for a table of `layouts`; cp is included only if a layout uses it."""
    return max((spread.axes for spread in layouts), key=len, default=())


def degrees(spread: Layout, names: Iterable[str]) -> str:
    """Return the degrees of a layout along the axes `names` as text: `4 x 1 x 8`."""
    return " x ".join(str(getattr(spread, axis)) for axis in names)


def describe_devices(count: int, system: System) -> str:
    """Return a text with number and name of a system's devices: `16 x NVIDIA V100 SXM3 32 GB (dgx2)`."""
    return f"{count:,} x {system.device.name} ({system.name})"


def results_option(folder: Path | str) -> str:
    """Return ` --results FOLDER` for a suggested command; empty for the default folder `results`."""
    return f" --results {folder}" * (str(folder) != "results")


def count_noun(count: float, noun: str) -> str:
    """Return a count with its noun in singular or plural: `1 case`, `2 cases`, `0.75 micro-batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{units.number(count)} {noun}{ending}"
