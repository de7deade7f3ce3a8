"""Data, tensor and sequence parallelism of torch: the device mesh, the strategy of a layout, and its application.

| stage | dp alone, fp32 | with tp or pp, and in 16 bits |
|---|---|---|
| 0 | DistributedDataParallel | `replicate`: FSDP2's machinery without shards |
| 1 | DistributedDataParallel, ZeroRedundancyOptimizer | dp alone: the same under autocast |
| 2 | FSDP2 that retains parameters between forward and backward (`reshard_after_forward=False`) | the same |
| 3 | FSDP2 | the same |

In 16 bits FSDP2 and `replicate` compute with cast parameters (`MixedPrecisionPolicy`) and sum gradients in 16 bits, as
the native engine does; under autocast gradients are fp32. Parameters and optimizer states are fp32 everywhere.

Tensor parallelism is Megatron's (1909.08053 sec. 3) by DTensor: queries, keys, values and the MLP's first matrix by
columns, `out` and `down` by rows, the embedding and the logits by vocabulary, with the cross-entropy on parts of the
logits (`loss_parallel`). Norms see their part of the sequence with sequence parallelism and are duplicates without it.
Every parameter becomes a DTensor of the tp mesh, so that norms and optimizer treat all alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from repro.config import Layout, Training
from repro.config.enums import StrEnum
from repro.engines.torch.model import PlainGPT
from repro.parallel.storage import DTYPES

AXES = ("pp", "dp", "tp")


def device_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """Return the mesh (pp, dp, tp) of all ranks, one for each shape and order; None with one rank."""
    if layout.world == 1:
        return None
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    strides = tuple(layout.strides[axis] for axis in AXES)
    return _cached_mesh(dist.group.WORLD, device_type, sizes, strides)


@cache
def _cached_mesh(
    world: dist.ProcessGroup, device_type: str, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> DeviceMesh:
    # A mesh creates process groups that are never freed, so the experiments of a launch share meshes.
    del world
    ranks = torch.arange(dist.get_world_size()).as_strided(sizes, strides)
    return DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=AXES)


class Strategy(StrEnum):
    """Data-parallel strategy by torch's name."""

    NONE = "one replica"
    DDP = "DistributedDataParallel"
    ZERO1 = "DistributedDataParallel, ZeroRedundancyOptimizer"
    REPLICATE = "replicate"
    FSDP2_KEPT = "FSDP2, reshard_after_forward=False"
    FSDP2 = "FSDP2"

    @property
    def composable(self) -> bool:
        """Return whether the strategy uses hooks on the module's blocks, which DTensors and stages need."""
        return self in (Strategy.REPLICATE, Strategy.FSDP2_KEPT, Strategy.FSDP2)


def strategy_of(layout: Layout) -> Strategy:
    """Return the strategy of a supported layout."""
    cast = layout.precision != "fp32"
    if layout.dp == 1:
        return Strategy.REPLICATE if cast and layout.world > 1 else Strategy.NONE
    if layout.zero == 1:
        return Strategy.ZERO1
    if layout.zero >= 2:
        return Strategy.FSDP2 if layout.zero == 3 else Strategy.FSDP2_KEPT
    return Strategy.REPLICATE if cast or layout.tp > 1 or layout.pp > 1 else Strategy.DDP


def apply_composable(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard or replicate the module over dp, block by block; its parameters may still be on `meta`."""
    strategy = strategy_of(layout)
    cast = None if layout.precision == "fp32" else DTYPES[layout.precision]
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=cast)
    parts: list[nn.Module] = [*module.blocks.values(), module]
    for part in parts:
        if strategy is Strategy.REPLICATE:
            replicate(part, mesh=mesh["dp"], mp_policy=policy)
        else:
            # The backward pass starts outside of the blocks; torch's default (None) retains those parameters.
            again = None if part is module and strategy is Strategy.FSDP2 else strategy is Strategy.FSDP2
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)


def wrap_in_ddp(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> DistributedDataParallel:
    """Return the module under DDP."""
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=layout.bucket_bytes / 2**20,
        gradient_as_bucket_view=layout.gradient_as_bucket_view,
    )


def adamw(modules: list[PlainGPT], training: Training, strategy: Strategy) -> Any:
    """Return fused AdamW of this rank's parameters; matrices decay, vectors do not."""
    groups = [{"params": [], "weight_decay": decay} for decay in (training.weight_decay, 0.0)]
    for module in modules:
        for name, parameter in module.named_parameters():
            vector = parameter.dim() == 1 or name.endswith("bias")
            groups[vector]["params"].append(parameter)  # type: ignore[attr-defined]
    settings: dict[str, Any] = {
        "lr": training.lr,
        "betas": (training.beta1, training.beta2),
        "eps": training.eps,
    }
    if strategy is Strategy.ZERO1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, fused=True, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


class DuplicatedParallel(ParallelStyle):
    """Compute the full module on every rank, on the same input; the local output has the placement `output`."""

    def __init__(self, output: Placement | None = None):
        super().__init__()
        self.output = output or Replicate()

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[self.output]).to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch annotates both functions without a result.
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]


def parallel_styles(module: PlainGPT, *, sp: bool) -> dict[str, ParallelStyle]:
    """Return the style of every module with parameters, by its name."""
    between = Shard(1) if sp else Replicate()
    found: dict[str, ParallelStyle] = {}

    def norm(name: str) -> None:
        found[name] = SequenceParallel() if sp else DuplicatedParallel()

    if module.part.first:
        found["embed.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        found["embed.positions"] = DuplicatedParallel(Shard(0)) if sp else DuplicatedParallel()
    for i in module.blocks:
        for name, columns, rows in (("attention", "qkv", "out"), ("mlp", "up", "down")):
            inner = f"blocks.{i}.{name}"
            norm(f"{inner}.norm")
            found[f"{inner}.{columns}"] = ColwiseParallel(input_layouts=between)
            found[f"{inner}.{rows}"] = RowwiseParallel(output_layouts=between)
    if module.part.last:
        norm("head.norm")
        found["head.output"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    return found


def apply_tensor_parallel(module: PlainGPT, mesh: DeviceMesh, *, sp: bool) -> None:
    """Convert the module's parameters to DTensors of the tp mesh."""
    parallelize_module(module, mesh, parallel_styles(module, sp=sp))
    module.tie()
    if module.part.last:
        # The loss is the same on all ranks; FSDP2 warns of views that leave a module.
        module.head.register_forward_hook(lambda head, inputs, loss: loss.to_local().clone())
