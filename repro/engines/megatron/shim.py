"""What lets megatron-core run on CPUs.  Nothing of this is active on CUDA.

The library makes small tensors with `device="cuda"` or `torch.cuda.current_device()`, waits for the device,
compares `tensor.type()` with names of CUDA types, and saves the generator's state of the device.  On CPUs

- the modules named in `MODULES` see a `torch` whose factories place on the CPU what was meant for a GPU, and
  whose `cuda` has one device, the CPU, and nothing to wait for;
- a tensor's `cuda()` is the tensor itself and its `type()` is called as it would be on CUDA;
- the random states of the device are empty.

All of it is part of the engine's `Exchange`, so that it is there only while the engine works.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from repro.engines.megatron.exchange import Place

MODULES = (
    "distributed.param_and_grad_buffer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
    "utils",
)
"""Modules of megatron.core that name the device."""
_FACTORIES = ("empty", "ones", "tensor", "zeros")


class _Cuda(ModuleType):
    """Stands for `torch.cuda`."""

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def synchronize() -> None:
        """There is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """Stands for `torch`."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda("torch.cuda")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: Any, device: Any = None, **keywords: Any) -> Tensor:
        return factory(*arguments, device="cpu" if device == "cuda" else device, **keywords)

    return made


class _Tracker:
    """Stands for the random states of tensor parallelism: without dropout nothing is drawn from them."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        with nullcontext():
            yield

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """There are none."""


def _type(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
    found = torch._C.TensorBase.type(tensor, *arguments, **keywords)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def replacements() -> dict[Place, Any]:
    """What is exchanged on CPUs, by its place."""
    fake = _Torch()
    found: dict[Place, Any] = {
        (importlib.import_module(f"megatron.core.{name}"), "torch"): fake for name in MODULES
    }
    found[torch.Tensor, "cuda"] = lambda tensor, *_, **__: tensor
    found[torch.Tensor, "type"] = _type
    found[random, "_get_cuda_rng_state"] = lambda *_, **__: None
    found[random, "_set_cuda_rng_state"] = lambda *_, **__: None
    found[random, "_CUDA_RNG_STATE_TRACKER"] = _Tracker()
    found[random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED"] = True
    return found
