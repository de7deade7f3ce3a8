"""Data parallelism: which of torch's strategies runs a layout, and what it makes of the module.

| stage | dp alone, fp32 | beside tp or pp, and in 16 bits |
|---|---|---|
| 0 | DistributedDataParallel | `replicate`: FSDP2's machinery without shards |
| 1 | DistributedDataParallel, ZeroRedundancyOptimizer | dp alone: the same under autocast |
| 2 | FSDP2, parameters kept between forward and backward (`reshard_after_forward=False`) | the same |
| 3 | FSDP2 | the same |

In 16 bits FSDP2 and `replicate` compute with cast parameters (`MixedPrecisionPolicy`) and sum gradients in 16 bits,
as our engine does; under autocast gradients are fp32.  Parameters and optimizer states are fp32 everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from repro.config import Layout, Training
from repro.config.enums import StrEnum
from repro.engines.torch.model import PlainGPT
from repro.parallel.storage import DTYPES


class Strategy(StrEnum):
    """What torch calls it."""

    NONE = "one replica"
    DDP = "DistributedDataParallel"
    ZERO1 = "DistributedDataParallel, ZeroRedundancyOptimizer"
    REPLICATE = "replicate"
    FSDP2_KEPT = "FSDP2, reshard_after_forward=False"
    FSDP2 = "FSDP2"

    @property
    def composable(self) -> bool:
        """Whether hooks on the module's own blocks do it, which is what goes together with DTensors and stages."""
        return self in (Strategy.REPLICATE, Strategy.FSDP2_KEPT, Strategy.FSDP2)


def strategy_of(layout: Layout) -> Strategy:
    """The strategy of a layout that the engine does not refuse."""
    cast = layout.precision != "fp32"
    if layout.dp == 1:
        return Strategy.REPLICATE if cast and layout.world > 1 else Strategy.NONE
    if layout.zero == 1:
        return Strategy.ZERO1
    if layout.zero >= 2:
        return Strategy.FSDP2 if layout.zero == 3 else Strategy.FSDP2_KEPT
    return Strategy.REPLICATE if cast or layout.tp > 1 or layout.pp > 1 else Strategy.DDP


def compose(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard or replicate the module over dp, block by block; its parameters may still be on `meta`."""
    strategy = strategy_of(layout)
    cast = None if layout.precision == "fp32" else DTYPES[layout.precision]
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=cast)
    parts: list[nn.Module] = [*module.blocks.values(), module]
    for part in parts:
        if strategy is Strategy.REPLICATE:
            replicate(part, mesh=mesh["dp"], mp_policy=policy)
        else:
            # What is outside of the blocks is needed again as backward begins: torch's default (None) keeps it.
            again = None if part is module and strategy is Strategy.FSDP2 else strategy is Strategy.FSDP2
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)


def distribute(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> DistributedDataParallel:
    """The module under DDP."""
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=layout.bucket_bytes / 2**20,
        gradient_as_bucket_view=layout.gradient_as_bucket_view,
    )


def optimizer_of(modules: list[PlainGPT], training: Training, strategy: Strategy) -> Any:
    """AdamW, fused, of what the rank holds of the parameters; matrices decay, vectors do not."""
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
