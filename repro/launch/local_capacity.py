"""Experiments that the local machine can run: its devices, its processor cores and its memory."""

from __future__ import annotations

import os

from repro import engines
from repro.config import Experiment
from repro.config.layout import ELEMENT_BYTES
from repro.config.sizes import RANKS_PER_CORE, SizeLimit
from repro.emulate import lab
from repro.model.counts import total_parameters
from repro.simulate.plan.closed_form import state_bytes
from repro.util import units
from repro.util.processes import memory_and_swap, usable_cores

DEVICES = {"local": "cpu", "local-gpu": "cuda"}
"""Device type of each system that the local launcher supports."""


def missing_resource(experiment: Experiment) -> str:
    """Return the devices or software that `experiment` needs and this machine lacks, as text; empty if none."""
    world = experiment.layout.world
    if experiment.system not in DEVICES:
        return f"{world} GPUs of system {experiment.system}"
    if DEVICES[experiment.system] == "cuda" and world > count_cuda_devices():
        return f"{world} GPUs of system {experiment.system}, and {count_cuda_devices()} are visible here"
    if DEVICES[experiment.system] == "cpu" and world > max_ranks().value:
        return f"{world} processes, and this machine takes {max_ranks().value} ({max_ranks().why})"
    if lacking := engines.missing_library(experiment.engine):
        return lacking
    return lab.missing_requirement() if experiment.network is not None else ""


def max_ranks() -> SizeLimit:
    """Return the maximum number of ranks that can share this machine's processor cores."""
    cores = usable_cores()
    return SizeLimit(RANKS_PER_CORE.value * cores, f"{RANKS_PER_CORE.value} a core: {RANKS_PER_CORE.why}")


def count_cuda_devices() -> int:
    """Return the number of CUDA devices that a rank sees. The driver is queried, so that torch is not imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def memory_shortage(experiment: Experiment) -> str:
    """Describe why `experiment` exceeds the available memory and which size fits; empty if memory may suffice.

    The estimate is a lower bound for every engine, so a rejected experiment could only run out of memory.
    """
    states, inputs = (_limited_bytes(experiment, size) for size in (_states(experiment), _inputs(experiment)))
    free = memory_and_swap()
    if states > free:
        return (
            f"{units.size(states)} of memory for model states alone, and {units.size(free)} are free here; "
            f"model = {experiment.model.name!r} has {total_parameters(experiment.model):,} parameters, and at most "
            f"{int(total_parameters(experiment.model) * free / states):,} fit in this layout"
        )
    if states + inputs > free:
        fits = int(experiment.layout.micro_batch * (free - states) / inputs)
        return (
            f"{units.size(states + inputs)} of memory for model states and the blocks' inputs alone, and "
            f"{units.size(free)} are free here; layout.micro_batch = {experiment.layout.micro_batch}, "
            f"and at most {fits} fit"
        )
    return ""


def _states(experiment: Experiment) -> float:
    """Return the bytes of model states of all ranks, each tensor-parallel replica counted once."""
    return experiment.layout.copies * sum(
        state_bytes(total_parameters(experiment.model), experiment.layout).values()
    )


def _inputs(experiment: Experiment) -> float:
    """Return the bytes of all block inputs of one micro-batch on every replica, which recomputation also retains."""
    model, layout = experiment.model, experiment.layout
    tokens = layout.micro_batch * experiment.seq
    return layout.dp * model.layers * tokens * model.hidden * ELEMENT_BYTES[layout.precision]


def _limited_bytes(experiment: Experiment, size: float) -> float:
    """Return `size`, or the memory limit of all ranks if that is smaller."""
    limit = experiment.limits.memory_bytes * experiment.layout.world
    return min(size, limit) if limit else size
