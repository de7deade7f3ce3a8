"""Setup of DeepSpeed: its import, its configuration, its `mpu`, and isolation of its module-level state.

A rank's process runs many experiments, some interleaved. DeepSpeed stores the `mpu` and all of activation checkpointing
in module variables and replaces `torch.nn.functional.linear`. `ModuleState` exchanges these variables.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from repro.config import Experiment, Layout
from repro.engines.frameworks.files import nested
from repro.engines.frameworks.rules import load_framework
from repro.engines.frameworks.table import settings_of
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh

_KEPT = {
    "torch.nn.functional": ("linear",),  # stage 3 puts its own there for good
    "deepspeed.utils.groups": ("mpu",),
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        *("mpu", "mp_rank", "mp_size", "mp_group", "num_layers", "deepspeed_checkpointing_enabled"),
        *(
            "PARTITION_ACTIVATIONS",
            "CPU_CHECKPOINT",
            "CONTIGUOUS_CHECKPOINTING",
            "SYNCHRONIZE",
            "PROFILE_TIME",
        ),
        *("contiguous_data_buffers", "data_offsets", "contiguous_size_buffers", "size_offsets"),
        *("timers", "_cpu_offload_engine", "_checkpoint_grad_enabled"),
    ),
}
"""Module variables that DeepSpeed sets for an experiment."""


def import_deepspeed(device_type: str) -> ModuleType:
    """Import DeepSpeed for a type of device, with messages of errors only."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids a query of the GPU's driver
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setuptools warns about distutils
        library = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch renames its collectives; DeepSpeed calls them by both names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if device_type == "cpu":
        # DeepSpeed requires fp16 instructions; torch computes without them.
        library.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # The first collective would compile DeepSpeed's shared-memory reduction, which is for inference.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


def join_process_group(device: torch.device) -> None:
    """Join a process group, which DeepSpeed needs even with one rank."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed reads the GPU's number here
    meshes.ensure_process_group(device)
    from deepspeed import comm

    comm.init_distributed(verbose=False)


class ModuleState:
    """Module variables of one engine; initially as after the import."""

    def __init__(self) -> None:
        self._modules = {name: importlib.import_module(name) for name in _KEPT}
        self._mine = _pristine(self._modules)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this engine's variables inside the context, and restore the others after it."""
        others = self._read()
        self._write(self._mine)
        try:
            yield
        finally:
            self._mine = self._read()
            self._write(others)

    def _read(self) -> dict[tuple[str, str], Any]:
        return {(m, v): getattr(self._modules[m], v) for m, names in _KEPT.items() for v in names}

    def _write(self, values: dict[tuple[str, str], Any]) -> None:
        for (module, name), value in values.items():
            setattr(self._modules[module], name, value)


def _pristine(modules: dict[str, ModuleType]) -> dict[tuple[str, str], Any]:
    """Return the values after the import: only `ModuleState.in_place` changes these variables."""
    return {
        (m, v): type(value)() if isinstance(value := getattr(modules[m], v), list) else value
        for m, names in _KEPT.items()
        for v in names
    }


def configuration(experiment: Experiment) -> dict[str, Any]:
    """Return the `config` of `deepspeed.initialize`, from the table of `frameworks`.

    Open settings keep DeepSpeed's defaults, except four sizes of stage 3: their defaults fit models of tens of billions
    of parameters, and would gather a small model once and retain it.
    """
    return nested(load_framework("deepspeed").options_of(settings_of(experiment)))


class ModelParallelUnit:
    """Groups of a layout as DeepSpeed's `mpu`, the model-parallel unit of Megatron-LM.

    Tensor parallelism is the suite's, and DeepSpeed applies ZeRO over dp, as in its release of February 2020.
    """

    def __init__(self, layout: Layout, mesh: Mesh):
        """Create all groups; every rank calls this."""
        self.mesh = mesh
        self.groups = {axis: _process_group(layout, axis) for axis in ("tp", "dp")}

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["tp"]

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["dp"]


def _process_group(layout: Layout, axis: str) -> dist.ProcessGroup:
    """Return this rank's process group along `axis`, even with one rank."""
    found = [(ranks, meshes.make_process_group(ranks)) for ranks in meshes.groups(layout, axis)]
    return next(group for ranks, group in found if dist.get_rank() in ranks)
