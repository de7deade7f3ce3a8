"""Things of `repro.config` in words: a layout, devices, and how many there are of something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from repro.config.layout import Layout
from repro.config.system import System
from repro.render import units

_KEYS = [field.name for field in fields(Layout)]
_SWITCHES = {
    "recompute": "recomputation",
    "sp": "sequence parallelism",
    "pa": "P_a",
    "pa_cpu": "P_a+cpu",
    "md": "M_D",
    "scatter_gather": "scatter/gather",
}
_KERNELS = {
    "reference": "torch's operators in place of kernels",
    "softmax": "operators of 2020 (softmax fused)",
    "unfused": "operators of 2019 (unfused)",
}


def layout(spread: Layout | Mapping[str, Any], *, degrees: bool = True, batches: bool = False) -> str:
    """`tp 2 x dp 4, ZeRO 1, fp16, recomputation`: what is off, or 1, is not said.

    `spread`: a layout, or the keys of one that a record holds.  `degrees`: also tp, pp and dp, and the pipeline's
    schedule; `batches`: also the batches.
    """
    given = spread if isinstance(spread, Mapping) else vars(spread)
    of = {key: given.get(key, getattr(Layout, key)) for key in _KEYS}
    axes = [f"{axis} {of[axis]}" for axis in ("tp", "pp", "dp") if of[axis] > 1]
    parts = [" x ".join(axes) or "one rank"] if degrees else []
    if of["dp"] > 1 or of["zero"]:
        how = f" by {of['zero1_reduce']}" if of["zero1_reduce"] != "reduce-scatter" else ""
        parts.append(f"ZeRO {of['zero']}{how}")
    parts.append(of["precision"])
    if batches:
        parts.append(f"micro-batch {of['micro_batch']} of {of['global_batch']}")
    if of["pp"] > 1 and degrees:
        parts.append(of["schedule"] + (f" with {of['chunks']} chunks" if of["chunks"] > 1 else ""))
        if batches:
            parts.append(f"{of['global_batch'] // of['dp'] // of['micro_batch']} micro-batches")
    parts += [words for key, words in _SWITCHES.items() if of[key]]
    if not of["cb"]:
        parts.append("without C_B")
    if of["kernels"] != "fused":
        parts.append(_KERNELS[of["kernels"]])
    if of["tp"] > 1 and not of["tp_overlap"]:
        parts.append("sums over tp waited for")
    if not of["overlap"]:
        parts.append("gradients reduced after backward" if of["zero"] < 2 else "reductions waited for")
    elif not of["gather_overlap"]:
        parts.append("parameters gathered before the step")
    return ", ".join(parts)


def devices(count: int, system: System) -> str:
    """`16 x NVIDIA V100 SXM3 32 GB (dgx2)`."""
    return f"{count:,} x {system.device.name} ({system.name})"


def counted(count: float, thing: str) -> str:
    """`1 case`, `2 cases`, `0.75 micro-batches`."""
    ending = "" if count == 1 else "es" if thing.endswith("ch") else "s"
    return f"{units.number(count)} {thing}{ending}"
