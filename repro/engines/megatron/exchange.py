"""Module variables of megatron-core for one experiment, and replacements of its functions.

The library stores groups, ranks, buffers and random states in module variables, but a process runs several experiments.
Each engine therefore has a set of these variables, which an `Exchange` activates during a call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import random
from torch import Tensor

from repro.config import Layout
from repro.engines import Attribute
from repro.parallel.mesh import ensure_process_group, make_process_group


def module_variables() -> dict[Attribute, Any]:
    """Return the module variables of megatron-core that depend on an experiment, with their values after the import."""
    groups = (name for name in vars(parallel_state) if name.startswith("_") and name[1:].isupper())
    names: list[Attribute] = [(parallel_state, name) for name in (*groups, "_global_process_group_list")]
    names += [(random, "_CUDA_RNG_STATE_TRACKER"), (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED")]
    return {
        **{(owner, name): getattr(owner, name) for owner, name in names},
        (parallel_state, "create_group"): _create_group,
    }


def _create_group(
    ranks: list[int], *_: object, group_desc: str = "", **__: object
) -> dist.ProcessGroup | dist.GroupMember:
    """Replace `parallel_state.create_group`: create each group once and share it between experiments.

    The pipeline's group is always separate: with two stages the library uses it for messages in one direction and the
    default group, which may have the same ranks, for the other direction.
    """
    purpose = (group_desc,) if group_desc == "PIPELINE_MODEL_PARALLEL_GROUP" else ()
    return make_process_group(tuple(ranks), purpose)


def initialize_groups(layout: Layout, device: torch.device) -> None:
    """Create megatron-core's process groups, while this experiment's module variables (`Exchange`) are active."""
    ensure_process_group(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        order=layout.order,
        create_gloo_process_groups=False,
    )


def seed_random_states(device: torch.device, value: int) -> None:
    """Seed the random states of megatron-core, which it forks even without dropout."""
    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(value)


def message_replacements() -> dict[Attribute, Any]:
    """Return a replacement of megatron-core's `_p2p_ops` that retains tensors until they are sent to another stage.

    Interleaved schedules of megatron-core 0.16 free an output (`deallocate_pipeline_outputs`) before it is sent, so
    that the next stage may receive other data (pull request 4047 of NVIDIA/Megatron-LM corrects this). The replacement
    sends an alias, which owns the memory until the message is complete.
    """
    send = p2p_communication._p2p_ops

    def sent(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **others: Any) -> Any:
        to_prev, to_next = _alias(tensor_send_prev), _alias(tensor_send_next)
        return send(tensor_send_prev=to_prev, tensor_send_next=to_next, **others)

    return {(p2p_communication, "_p2p_ops"): sent}


def _alias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


DEVICE_MODULES = (
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
"""Modules of megatron.core that create tensors with `device="cuda"`, and must be redirected to run on CPUs."""
_FACTORIES = ("empty", "ones", "tensor", "zeros")


class _Cuda(ModuleType):
    """Replacement of `torch.cuda` with one device, the CPU."""

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def synchronize() -> None:
        """Do nothing instead of `torch.cuda.synchronize`, because operators on a CPU are synchronous."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """Replacement of `torch` whose factories place tensors on the CPU instead of a GPU."""

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
    """Replacement of megatron-core's tracker of random states under tensor parallelism, which only dropout needs."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Do nothing instead of restoring CUDA random states, which do not exist on a CPU."""


def _type(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
    found = torch._C.TensorBase.type(tensor, *arguments, **keywords)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def cpu_replacements() -> dict[Attribute, Any]:
    """Return replacements of functions and variables that let megatron-core run on CPUs.

    - Modules that create CUDA tensors (`DEVICE_MODULES`) use a `torch` that creates CPU tensors and has one device.
    - `cuda()` of a tensor returns the tensor, and `type()` returns the name of the CUDA type.
    - The random states of the device are empty.
    """
    fake = _Torch()
    found: dict[Attribute, Any] = {
        (importlib.import_module(f"megatron.core.{name}"), "torch"): fake for name in DEVICE_MODULES
    }
    found[torch.Tensor, "cuda"] = lambda tensor, *_, **__: tensor
    found[torch.Tensor, "type"] = _type
    found[random, "_get_cuda_rng_state"] = lambda *_, **__: None
    found[random, "_set_cuda_rng_state"] = lambda *_, **__: None
    found[random, "_CUDA_RNG_STATE_TRACKER"] = _Tracker()
    found[random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED"] = True
    return found
