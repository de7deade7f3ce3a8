"""`repro.parallelize`: data parallelism and ZeRO 1-3 for a stock PyTorch module and optimizer.

    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=4, zero=3))

The training loop stays as it is: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`.
Both objects are changed in place: the module's parameters move into buckets, the optimizer's into this
rank's shards of them, so its states are partitioned and learning-rate schedulers keep working.  Any
element-wise optimizer will do (SGD, Adam, AdamW, ...); one that looks at whole matrices will not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from repro.config import ConfigError, Layout
from repro.parallel import mesh as meshes
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Tag
from repro.parallel.zero.grad_reduce import broadcast_parameters
from repro.parallel.zero.partition import default_units
from repro.parallel.zero.stage3_checks import UnitAgreement
from repro.parallel.zero.stages import Sharding
from repro.wrap.loop import StockLoop
from repro.wrap.module_states import WrappedModule
from repro.wrap.refusals import check_clip, check_module, check_narrow, check_optimizer


def parallelize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    *,
    blocks: Sequence[str] | None = None,
    clip: float = 0.0,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Spread `module` and `optimizer` over `layout.dp` ranks; returns both, changed in place.

    `blocks` names the submodules that stage 3 gathers one at a time (default: the children of every
    `nn.ModuleList`, else of `nn.Sequential`; where these are bare containers, the modules inside).
    `clip` is the largest global gradient norm (0: none).  After a backward pass `p.grad` is the mean over all
    ranks: torch's `clip_grad_norm_` and `clip_grad_value_`, norms and scaling in place work on every stage, on all
    ranks at once; anything else needs stage 0, where it is a plain tensor.

    Any number of backward passes may belong to one `optimizer.step()`.  Where `layout.accumulation` says how many,
    or `module.no_sync()` which are not the last, stages 0 and 1 communicate once; else after every pass.  Each
    rank feeds its own samples and divides its loss by the accumulation, as with plain PyTorch.  A parameter that no
    rank used is left alone, and buffers that changed become rank 0's after every step.

    In bf16 the module is what `module.to(torch.bfloat16)` is, frozen parameters and buffers included; the
    trained parameters' fp32 values become the master weights.  Frozen parameters have neither masters nor
    gradients; under stage 3 a rank has its shard of their values, under the other stages all.

    `optimizer.step()` returns when every rank has the updated parameters (stages 1 and 2), whatever the
    layout's `gather_overlap` says: a stock script may read them anywhere.  Under stage 3 no rank has whole
    parameters outside their modules' passes: reading one raises an error, and
    `module.repro.full_parameters()` gathers copies of them, on all ranks at once.  There all ranks must use the
    same modules in a pass (not the same parameters in them), else all raise an error.  One backward pass may go
    through several forward passes.

    Without a process group one is made from the environment that torchrun sets.  All replicas start from
    rank 0's values.  `optimizer.state_dict()` and `module.repro.shard_state_dict()` are a rank's own and can be
    loaded there only.  `full_state_dict()` of `optimizer.repro` and of `module.repro`, on all ranks at once, makes
    the stock one's, which `load_state_dict` of either takes on every rank of any layout.  Raises `ConfigError` if the
    layout does not fit the processes, `ValueError` for what would train wrongly (`repro.wrap.refusals`), or if the
    process group cannot serve the module's device.
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
        raise ConfigError(
            "precision", "fp16", "fp32 or bf16 here; fp16 needs a scaled loss (see NativeEngine)"
        )
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
"""What carries the collectives of a module on a device of this type."""


NOT_FOR_STOCK_MODULES = (
    ("tp", 1, "a stock module has no tensor-parallel layers"),
    ("cp", 1, "a stock module's attention sees all tokens of a sample"),
    ("pp", 1, "a stock module is not cut into pipeline stages"),
    ("recompute", False, "a stock module calls torch.utils.checkpoint itself"),
    ("kernels", "fused", "a stock module brings its own operators"),
    ("offload_optimizer", False, "optimizer states stay on the device here"),
)
"""What a layout must not ask of a module that is not ours, and why."""


def _mesh(layout: Layout, device: torch.device) -> meshes.Mesh:
    for key, wanted, why in NOT_FOR_STOCK_MODULES:
        if getattr(layout, key) != wanted:
            raise ConfigError(key, getattr(layout, key), f"{str(wanted).lower()}: {why}")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(_backend(device))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.dp != world:
        raise ConfigError("dp", layout.dp, f"the number of processes, {world}")
    if world == 1:
        return meshes.single_rank_mesh()
    require_backend(dist.get_backend_config(), device)
    return meshes.distributed_mesh(layout, device.type)


def _backend(device: torch.device) -> str:
    if device.type not in BACKENDS:
        raise ValueError(f"module: on {device.type}; several processes need it on {' or '.join(BACKENDS)}")
    return BACKENDS[device.type]


def require_backend(config: str, device: torch.device) -> None:
    """Raise `ValueError` unless the process group serves the device; `config` as `"cpu:gloo,cuda:nccl"`."""
    needed = _backend(device)
    found = dict(pair.split(":") for pair in config.split(",")).get(device.type)
    if found != needed:
        raise ValueError(
            f"process group: has {config}, which lacks {device.type}:{needed} for a module on {device.type}; "
            f'use init_process_group("{needed}")'
        )
