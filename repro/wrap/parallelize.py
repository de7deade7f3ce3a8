"""`repro.parallelize`: data parallelism and ZeRO 1-3 for a stock PyTorch module and optimizer.

    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=4, zero=3))

The training loop remains unchanged. Both objects are changed in place: the module's parameters move into buckets, and
the optimizer gets this rank's shards of them. The optimizer must update each element independently (SGD, AdamW, ...).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from repro.config import ConfigError, Layout, require
from repro.parallel import mesh as meshes
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Sharding, Tag
from repro.parallel.zero.grad_reduce import broadcast_parameters
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stage3_checks import UnitAgreement
from repro.wrap.loop import StockLoop
from repro.wrap.refusals import check_clip, check_module, check_narrow, check_optimizer
from repro.wrap.state_dicts import WrappedModule


def parallelize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    *,
    blocks: Sequence[str] | None = None,
    clip: float = 0.0,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Distribute `module` and `optimizer` over `layout.dp` ranks; return both, changed in place.

    `blocks` names the submodules that stage 3 gathers one at a time. The default is the children of every
    `nn.ModuleList`, else of `nn.Sequential`, or the modules inside if the children are bare containers. `clip` is the
    maximum global gradient norm (0: none). After a backward pass `p.grad` is the mean over all ranks. torch's
    `clip_grad_norm_` and `clip_grad_value_`, norms and in-place scaling work under every stage, on all ranks at once.
    All other uses need stage 0, where `p.grad` is a plain tensor.

    One `optimizer.step()` may follow any number of backward passes. If `layout.accumulation` gives the number, or
    `module.no_sync()` marks passes before the last, stages 0 and 1 communicate once, else after every pass. Each rank
    feeds its own samples and divides its loss by the accumulation, as in plain PyTorch. A parameter that no rank used
    is unchanged. Changed buffers get the values of rank 0 after every step.

    In bf16 the module equals `module.to(torch.bfloat16)`, including frozen parameters and buffers. The fp32 values of
    trained parameters become the master weights. Frozen parameters have no masters and no gradients. A rank has its
    shard of frozen parameters under stage 3, and all frozen parameters under other stages.

    `optimizer.step()` returns when every rank has the updated parameters (stages 1 and 2), regardless of the layout's
    `gather_overlap`, because a stock script may read parameters anywhere. Under stage 3 no rank has full parameters
    outside their modules' passes, and reading a parameter there raises an error. `module.repro.full_parameters()`
    gathers copies on all ranks at once. Under stage 3 all ranks must use the same modules in a pass (not the same
    parameters of these modules), else all ranks raise an error. One backward pass may follow several forward passes.

    Without a process group, the function creates one from torchrun's environment. All replicas start from rank 0's
    values. `optimizer.state_dict()` and `module.repro.shard_state_dict()` belong to one rank and can be loaded only
    on that rank. `full_state_dict()` of `optimizer.repro` and of `module.repro`, called on all ranks at once, returns
    the state dict of a stock optimizer or module. `load_state_dict()` accepts that dict on every rank of any layout.

    Raises `ConfigError` if the layout does not fit the processes. Raises `ValueError` if the training would be wrong
    (`repro.wrap.refusals`), or if the process group does not support the module's device.
    """
    if not isinstance(layout, Layout):
        raise ConfigError("layout", layout, "a repro.Layout, such as repro.Layout(dp=2, zero=3)")
    check_module(module)
    check_optimizer(optimizer, module)
    check_clip(clip)
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device
    mesh = _mesh(layout, device)
    if layout.precision == "fp16":
        raise ConfigError("precision", "fp16", "fp32 or bf16; for fp16 use fp32 with autocast and GradScaler")
    if layout.precision == "bf16":
        check_narrow(module)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def values(parameters: list[Parameter]) -> InitialValues:
        given = [p.data.contiguous().view(-1) for p in parameters]
        return lambda index, start, stop: given[index][start:stop]

    dtype = None if layout.precision == "fp32" else DTYPES[layout.precision]
    sharding = replace(Sharding.from_layout(layout, mesh.dp, device, dtype), gather_overlap=False)
    if mesh.dp.size > 1:
        broadcast_parameters([t.data for t in tensors], mesh.dp)
    units = default_units(module, blocks)
    sharded = WrappedModule(module, units, sharding, lambda p: Tag(group_of[id(p)]), values)
    host = meshes.host_group(mesh.dp)
    if sharded.gatherer is not None:
        sharded.gatherer.enable_checks(UnitAgreement(host.on_channel(1 + len(units))))
    loop = StockLoop(module, optimizer, sharded, units, layout.accumulation, clip, host)
    module.repro = sharded  # type: ignore[assignment]
    optimizer.repro = loop.states  # type: ignore[attr-defined]
    return module, optimizer


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Required backend of `torch.distributed`, by the device type of the module."""


NOT_FOR_STOCK_MODULES = (
    ("tp", 1, "a stock module has no tensor-parallel layers"),
    ("cp", 1, "attention in a stock module needs all tokens of a sample on one rank"),
    ("pp", 1, "a stock module is not divided into pipeline stages"),
    ("recompute", False, "a stock module calls torch.utils.checkpoint itself"),
    ("kernels", "fused", "a stock module defines its own operators"),
    ("offload_optimizer", False, "repro.parallelize does not move optimizer states to host memory"),
    ("grad_dtype", "precision", "a stock optimizer reads gradients in the data type of its parameters"),
)
"""Layout keys for which `repro.parallelize` supports only one value: key, supported value and reason."""


def _mesh(layout: Layout, device: torch.device) -> meshes.Mesh:
    for key, wanted, why in NOT_FOR_STOCK_MODULES:
        if getattr(layout, key) != wanted:
            raise ConfigError(key, getattr(layout, key), f"{str(wanted).lower()}: {why}")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(_backend(device))
    world = dist.get_world_size() if dist.is_initialized() else 1
    require(layout.dp == world, "dp", layout.dp, f"the number of processes, {world}")
    if world == 1:
        return meshes.single_rank_mesh()
    require_backend(dist.get_backend_config(), device)
    return meshes.distributed_mesh(layout, device.type)


def _backend(device: torch.device) -> str:
    if device.type not in BACKENDS:
        raise ValueError(
            f"module: device type {device.type} is not supported. Move the module to {' or '.join(BACKENDS)}."
        )
    return BACKENDS[device.type]


def require_backend(config: str, device: torch.device) -> None:
    """Raise `ValueError` unless the backends in `config` (such as `"cpu:gloo,cuda:nccl"`) support `device`."""
    needed = _backend(device)
    found = dict(pair.split(":") for pair in config.split(",")).get(device.type)
    if found != needed:
        raise ValueError(
            f"process group: {config} does not support a module on {device.type}. "
            f'Call init_process_group("{needed}").'
        )
