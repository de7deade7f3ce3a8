"""``repro.parallelize``: data parallelism and ZeRO 1-3 for a stock PyTorch module and optimizer.

    module, optimizer = repro.parallelize(module, optimizer, Layout(dp=4, zero=3))

The training loop stays as it is: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``.
Both objects are changed in place: the module's parameters move into buckets, the optimizer's into this
rank's shards of them, so its states are partitioned and learning-rate schedulers keep working.  Any
element-wise optimizer will do (SGD, Adam, AdamW, ...); one that looks at whole matrices will not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
from repro.parallel.units import Unit, default_units, parameters_of


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
    ``nn.ModuleList``, else of ``nn.Sequential``; where these are bare containers, the modules inside).
    ``clip`` is the largest global gradient norm (0: none); ``torch.nn.utils.clip_grad_norm_`` cannot be
    used, since gradients are in buckets.  With ``layout.accumulation`` > 1 that many backward passes belong
    to one ``optimizer.step()``; each rank feeds its own samples and divides its loss by the accumulation,
    as with plain PyTorch.

    In bf16 the module is what ``module.to(torch.bfloat16)`` is, frozen parameters and buffers included; the
    trained parameters' fp32 values become the master weights.

    ``optimizer.step()`` returns while updated parameters are on their way (stages 1 and 2).  The next
    forward pass and ``module.state_dict()`` wait for them; who reads ``module.layer.weight`` otherwise calls
    ``module.repro.wait()`` first.  Under stage 3 no rank has whole parameters between passes:
    ``module.repro.full_parameters()`` gathers copies of them, on all ranks at once.  There all ranks must
    use the same modules in a pass (not the same parameters in them), and each forward pass with gradients
    is followed by its backward pass before the next one.

    Without a process group one is made from the environment that torchrun sets.  All replicas start from
    rank 0's values.  Raises ``ConfigError`` if the layout does not fit the processes, ``ValueError`` if
    the optimizer was already used or does not have a trainable parameter, or if the process group cannot
    serve the module's device.
    """
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device
    mesh = _mesh(layout, device)
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

    def values(parameters: list[Parameter]) -> InitialValues:
        given = [p.data.contiguous().view(-1) for p in parameters]
        return lambda index, start, stop: given[index][start:stop].float()

    dtype = None if layout.precision == "fp32" else DTYPES[layout.precision]
    sharding = Sharding.of(layout, mesh.dp, device, dtype)
    if mesh.dp.size > 1:
        broadcast_parameters([t.data for t in tensors], mesh.dp)
    units = default_units(module, blocks)
    sharded = ShardedModule(module, units, sharding, lambda p: Tag(group_of[id(p)]), values)
    _Loop(module, optimizer, sharded, units, layout.accumulation, clip)
    module.repro = sharded  # type: ignore[assignment]
    return module, optimizer


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries the collectives of a module on a device of this type."""


NOT_FOR_STOCK_MODULES = (
    ("tp", 1, "a stock module has no tensor-parallel layers"),
    ("pp", 1, "a stock module is not cut into pipeline stages"),
    ("recompute", False, "a stock module calls torch.utils.checkpoint itself"),
    ("kernels", "fused", "a stock module brings its own operators"),
)
"""What a layout must not ask of a module that is not ours, and why."""


def _mesh(layout: Layout, device: torch.device) -> meshes.Mesh:
    for key, wanted, why in NOT_FOR_STOCK_MODULES:
        if getattr(layout, key) != wanted:
            raise ConfigError(key, getattr(layout, key), f"{wanted}: {why}")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(_backend(device))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.dp != world:
        raise ConfigError("dp", layout.dp, f"the number of processes, {world}")
    if world == 1:
        return meshes.single()
    require_backend(dist.get_backend_config(), device)
    return meshes.distributed(layout, device.type)


def _backend(device: torch.device) -> str:
    if device.type not in BACKENDS:
        raise ValueError(f"module: on {device.type}; several processes need it on {' or '.join(BACKENDS)}")
    return BACKENDS[device.type]


def require_backend(config: str, device: torch.device) -> None:
    """Raise ``ValueError`` unless the process group serves the device; ``config`` as ``"cpu:gloo,cuda:nccl"``."""
    needed = _backend(device)
    found = dict(pair.split(":") for pair in config.split(",")).get(device.type)
    if found != needed:
        raise ValueError(
            f"process group: has {config}, which lacks {device.type}:{needed} for a module on {device.type}; "
            f'use init_process_group("{needed}")'
        )


class _Loop:
    """Ties a sharded module to the stock loop: hooks on forward, backward and ``optimizer.step``."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharded: ShardedModule,
        units: Sequence[Unit],
        accumulation: int,
        clip: float,
    ):
        self.sharded, self.accumulation, self.clip = sharded, accumulation, clip
        self.micro_batch = 0
        self._forward = False
        """Whether a forward pass waits for its backward pass."""
        self._recording = False
        """Whether the forward pass that runs, or ran last, was made with gradients."""
        self._queued = False
        """Whether a backward pass runs."""
        self._uses: dict[int, tuple[int, bool]] = {}
        """How often each block was used since the last backward pass, and whether under a reentrant checkpoint."""
        self._shards: list[tuple[Parameter, Tensor]] = []
        """Each of the optimizer's new parameters, with the reduced gradient that belongs to it."""
        self._share_out(optimizer)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward)
        if sharded.reducer.by_arrival:
            self._watch_repeats(module, units)
        _guard_state_dict(module, sharded)
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

    def _watch_repeats(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Stages 0 to 2: keep the buckets of a block that reentrant checkpointing runs twice in a pass.

        Its parameters get a gradient for each time, and the first must not be taken for the whole.
        """
        bucket_of = {id(p): bucket for bucket in self.sharded.buckets for p in bucket.parameters}
        names = dict(module.named_modules())

        def watch(parameters: list[Parameter]) -> Callable[..., None]:
            buckets = [bucket_of[id(p)] for p in parameters if id(p) in bucket_of]

            def count(block: nn.Module, inputs: Any) -> None:
                if not self._recording or self._queued:  # evaluation, or recomputation
                    return
                times, checkpointed = self._uses.get(id(block), (0, False))
                checkpointed |= not torch.is_grad_enabled()
                self._uses[id(block)] = times + 1, checkpointed
                if times and checkpointed:
                    for bucket in buckets:
                        self.sharded.reducer.hold(bucket)

            return count

        for unit, parameters in zip(units, parameters_of(module, units), strict=True):
            for use in unit.uses:
                names[use.module].register_forward_pre_hook(watch(parameters))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._queued and torch._C._current_graph_task_id() != -1:
            return  # recomputation of the whole module
        self._queued = False  # a backward pass that failed has not taken it back
        self._recording = torch.is_grad_enabled()
        if not self._recording:
            if self.sharded.gatherer is not None:
                self.sharded.gatherer.begin()
            return
        if self.micro_batch >= self.accumulation:
            raise RuntimeError(
                f"{self.accumulation + 1} backward passes before optimizer.step(), "
                f"but the layout's accumulation is {self.accumulation}"
            )
        self._forward = True
        self.sharded.begin(self.micro_batch, self.accumulation)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        if not self._queued:
            if not self._forward:
                raise RuntimeError(
                    "a second backward pass after one forward pass: sum the losses for one backward pass, "
                    "or run each forward pass right before its backward pass"
                )
            self._queued = True
            # What torch's own DDP and FSDP use to learn that a backward pass is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]

    def _after_backward(self) -> None:
        self._queued = self._forward = False
        self._uses.clear()
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


def _guard_state_dict(module: nn.Module, sharded: ShardedModule) -> None:
    """Let ``state_dict()`` and ``load_state_dict()`` see complete parameters, or refuse where there are none."""
    mine = {id(p) for p in sharded.parameters}
    mixed = any(bucket.master is not bucket.shard for bucket in sharded.buckets)

    def save(child: nn.Module, prefix: str, keep_vars: bool) -> None:
        if sharded.sharding.stage == 3:
            raise RuntimeError(
                "state_dict(): under zero = 3 no rank has whole parameters; "
                "call module.repro.full_parameters() on all ranks"
            )
        sharded.wait()

    def load(child: nn.Module, *_: Any) -> None:
        if sharded.sharding.stage == 3 or mixed:
            raise RuntimeError(
                "load_state_dict(): would not reach the shards and master weights; load before repro.parallelize"
            )
        sharded.wait()

    for child in module.modules():
        if any(id(p) in mine for p in child._parameters.values()):
            child.register_state_dict_pre_hook(save)
            child.register_load_state_dict_pre_hook(load)
