"""``repro.parallelize``: data parallelism and ZeRO 1-3 for a stock PyTorch module and optimizer.

    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=4, zero=3))

The training loop stays as it is: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``.
Both objects are changed in place: the module's parameters move into buckets, the optimizer's into this
rank's shards of them, so its states are partitioned and learning-rate schedulers keep working.  Any
element-wise optimizer will do (SGD, Adam, AdamW, ...); one that looks at whole matrices will not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from repro import kernels
from repro.config import ConfigError, Layout
from repro.parallel import mesh as meshes
from repro.parallel.bucket import InitialValues, Tag
from repro.parallel.comm import SUM
from repro.parallel.data import broadcast_parameters
from repro.parallel.precision import DTYPES
from repro.parallel.sharding import ShardedModule, Sharding
from repro.parallel.zero import default_units


def parallelize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    *,
    blocks: Sequence[str] | None = None,
    clip: float = 0.0,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Spread ``module`` and ``optimizer`` over ``layout.dp`` ranks; returns both, changed in place.

    ``blocks`` names the submodules that stage 3 gathers one at a time (default: the children of every
    ``nn.ModuleList``, else of ``nn.Sequential``).  ``clip`` is the largest global gradient norm (0: none);
    ``torch.nn.utils.clip_grad_norm_`` cannot be used, since gradients are in buckets.  With
    ``layout.accumulation`` > 1 that many backward passes belong to one ``optimizer.step()``; each rank
    feeds its own samples and divides its loss by the accumulation, as with plain PyTorch.

    Without a process group one is made from the environment that torchrun sets.  All replicas start from
    rank 0's values.  Raises ``ConfigError`` if the layout does not fit the processes, ``ValueError`` if
    the optimizer was already used or does not have a trainable parameter.
    """
    mesh = _mesh(layout)
    if layout.precision == "fp16":
        raise ConfigError(
            "precision", "fp16", "fp32 or bf16 here; fp16 needs a scaled loss (see NativeEngine)"
        )
    if optimizer.state:
        raise ValueError("optimizer: has states already; parallelize it before its first step")
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in group_of:
            raise ValueError(f"optimizer: has no parameter group for {name}, which requires a gradient")
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device

    def values(parameters: list[Parameter]) -> InitialValues:
        given = [p.data.contiguous().view(-1) for p in parameters]
        return lambda index, start, stop: given[index][start:stop].float()

    dtype = None if layout.precision == "fp32" else DTYPES[layout.precision]
    sharding = Sharding.of(layout, mesh.dp, device, dtype)
    if mesh.dp.size > 1:
        broadcast_parameters([t.data for t in tensors], mesh.dp)
    units = default_units(module, blocks)
    sharded = ShardedModule(module, units, sharding, lambda p: Tag(group_of[id(p)]), values)
    _Loop(module, optimizer, sharded, layout.accumulation, clip)
    module.repro = sharded  # type: ignore[assignment]
    return module, optimizer


def _mesh(layout: Layout) -> meshes.Mesh:
    if layout.tp != 1:
        raise ConfigError("tp", layout.tp, "1: a stock module has no tensor-parallel layers")
    if layout.pp != 1:
        raise ConfigError("pp", layout.pp, "1: a stock module is not cut into pipeline stages")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.dp != world:
        raise ConfigError("dp", layout.dp, f"the number of processes, {world}")
    if world == 1:
        return meshes.single()
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return meshes.distributed(layout, kind)


class _Loop:
    """Ties a sharded module to the stock loop: hooks on forward, backward and ``optimizer.step``."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharded: ShardedModule,
        accumulation: int,
        clip: float,
    ):
        self.sharded, self.accumulation, self.clip = sharded, accumulation, clip
        self.micro_batch = 0
        self._queued = False
        self._shards: list[tuple[Parameter, Tensor]] = []
        """Each of the optimizer's new parameters, with the reduced gradient that belongs to it."""
        self._share_out(optimizer)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _share_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this rank's shards instead of the module's parameters."""
        found: list[list[Parameter]] = [[] for _ in optimizer.param_groups]
        for bucket in self.sharded.buckets:
            for tag, start, stop in bucket.ranges():
                shard = Parameter(bucket.master[start:stop])
                found[tag.group].append(shard)
                self._shards.append((shard, bucket.gradient_shard[start:stop]))
        for group, parameters in zip(optimizer.param_groups, found, strict=True):
            group["params"] = parameters

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            if self.sharded.gatherer is not None:
                self.sharded.gatherer.begin()
            return
        if self.micro_batch >= self.accumulation:
            raise RuntimeError(
                f"{self.accumulation + 1} backward passes before optimizer.step(), "
                f"but the layout's accumulation is {self.accumulation}"
            )
        self.sharded.begin(self.micro_batch, self.accumulation)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            # What torch's own DDP and FSDP use to learn that a backward pass is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _after_backward(self) -> None:
        self._queued = False
        self.sharded.finish()
        self.micro_batch += 1

    def _before_step(self, *_: Any) -> None:
        if self.micro_batch != self.accumulation:
            raise RuntimeError(
                f"optimizer.step() after {self.micro_batch} backward passes, "
                f"but the layout's accumulation is {self.accumulation}"
            )
        for shard, gradient in self._shards:
            shard.grad = gradient.to(shard.dtype)
        if self.clip:
            self._clip()

    def _clip(self) -> None:
        group = self.sharded.sharding.group
        gradients = [shard.grad for shard, _ in self._shards if shard.grad is not None]
        # A rank whose shards are all padding has nothing to add, but takes part in the sum.
        like = self.sharded.buckets[0].master
        squares = kernels.norm_squared(gradients) if gradients else torch.zeros((), device=like.device)
        if self.sharded.sharding.stage:
            group.all_reduce(squares, SUM, purpose="norm").wait()
        factor = (self.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _after_step(self, *_: Any) -> None:
        self.micro_batch = 0
        for shard, _gradient in self._shards:
            shard.grad = None
        for bucket in self.sharded.buckets:
            if bucket.master is not bucket.shard:
                bucket.shard.copy_(bucket.master)
        self.sharded.publish()
