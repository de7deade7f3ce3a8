"""The import of DeepSpeed, and how what it keeps in modules is kept to one experiment.

A rank's process runs many experiments, some by turns.  DeepSpeed remembers the `mpu` and all of activation
checkpointing in module-level variables, and replaces `torch.nn.functional.linear`; `Globals` puts an engine's in
place while it works.
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
"""Variables of modules that DeepSpeed sets for an experiment."""


def load(device_type: str) -> ModuleType:
    """DeepSpeed, imported for the kind of device that this process uses, and silent below errors."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would ask for a GPU's driver first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setuptools about distutils
        library = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch renames its collectives; DeepSpeed calls them by both names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if device_type == "cpu":
        # It asks whether the processor has instructions for fp16; torch computes without them too.
        library.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # Its reduction by shared memory is for inference, and would be compiled at the first use of any collective.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


def join(device: torch.device) -> None:
    """Be in a process group: DeepSpeed needs one even where there is nobody else."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # of which it takes the number of the GPU
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    from deepspeed import comm

    comm.init_distributed(verbose=False)


class Globals:
    """What modules keep for one engine; as imported before its first use."""

    def __init__(self) -> None:
        self._modules = {name: importlib.import_module(name) for name in _KEPT}
        self._mine = _pristine(self._modules)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """This engine's variables are in force; after it those that were before."""
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
    """Values as the import left them: nobody writes these variables but inside `Globals.in_place`."""
    return {
        (m, v): type(value)() if isinstance(value := getattr(modules[m], v), list) else value
        for m, names in _KEPT.items()
        for v in names
    }
