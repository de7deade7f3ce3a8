"""PyTorch's data, tensor and pipeline parallelism for a layout.

| ZeRO stage | only dp, in fp32 | with tp or pp, or in 16 bits |
|---|---|---|
| 0 | DistributedDataParallel | `replicate`: FSDP2's implementation without shards |
| 1 | DistributedDataParallel, ZeroRedundancyOptimizer | only dp, in 16 bits: as in fp32, but under autocast |
| 2 | FSDP2 that retains parameters between forward and backward (`reshard_after_forward=False`) | as in fp32 |
| 3 | FSDP2 | as in fp32 |

In 16 bits FSDP2 and `replicate` cast parameters (`MixedPrecisionPolicy`) and sum gradients in 16 bits; under autocast
gradients are fp32. Tensor parallelism is Megatron's (1909.08053 sec. 3), with DTensors of the tp mesh for all
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from repro.config import Experiment, Layout, Training
from repro.config.enums import Phase, StrEnum
from repro.engines.native.model_part import MicroBatch
from repro.engines.torch.model import PlainGPT
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import DTYPES

AXES = ("pp", "dp", "tp")


def device_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """Return torch's device mesh (pp, dp, tp) of all ranks, shared by layouts of equal shape; None for one rank."""
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
    """Data-parallel strategy of torch: DistributedDataParallel, `replicate` or FSDP2."""

    NONE = "one replica"
    DDP = "DistributedDataParallel"
    ZERO1 = "DistributedDataParallel, ZeroRedundancyOptimizer"
    REPLICATE = "replicate"
    FSDP2_KEPT = "FSDP2, reshard_after_forward=False"
    FSDP2 = "FSDP2"

    @property
    def composable(self) -> bool:
        """Return whether the data-parallel strategy hooks a module's blocks, and so can be combined with tp and pp."""
        return self in (Strategy.REPLICATE, Strategy.FSDP2_KEPT, Strategy.FSDP2)


def strategy_of(layout: Layout) -> Strategy:
    """Return torch's data-parallel strategy for a layout that engine `torch` supports."""
    cast = layout.precision != "fp32"
    if layout.dp == 1:
        return Strategy.REPLICATE if cast and layout.world > 1 else Strategy.NONE
    if layout.zero == 1:
        return Strategy.ZERO1
    if layout.zero >= 2:
        return Strategy.FSDP2 if layout.zero == 3 else Strategy.FSDP2_KEPT
    return Strategy.REPLICATE if cast or layout.tp > 1 or layout.pp > 1 else Strategy.DDP


def apply_composable(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> None:
    """Apply FSDP2 or `replicate` over dp to the module, block by block. Its parameters may still be on `meta`."""
    strategy = strategy_of(layout)
    cast = None if layout.precision == "fp32" else DTYPES[layout.precision]
    reduced = DTYPES["fp32"] if layout.grad_dtype == "fp32" else cast
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=reduced)
    parts: list[nn.Module] = [*module.blocks.values(), module]
    for part in parts:
        if strategy is Strategy.REPLICATE:
            replicate(part, mesh=mesh["dp"], mp_policy=policy)
        else:
            # Retain parameters outside the blocks after forward, because backward starts with them.
            again = None if part is module and strategy is Strategy.FSDP2 else strategy is Strategy.FSDP2
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)


def wrap_in_ddp(module: PlainGPT, layout: Layout, mesh: DeviceMesh) -> DistributedDataParallel:
    """Return the module wrapped in DistributedDataParallel, with the layout's bucket size."""
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=layout.bucket_bytes / 2**20,
        gradient_as_bucket_view=layout.gradient_as_bucket_view,
    )


def adamw(modules: list[PlainGPT], training: Training, strategy: Strategy) -> Any:
    """Return torch's fused AdamW of this rank's parameters, with weight decay of matrices, but not of vectors."""
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
    """Tensor-parallel style in which every rank computes the full module; the result gets placement `output`."""

    def __init__(self, output: Placement | None = None):
        super().__init__()
        self.output = output or Replicate()

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[self.output]).to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Ignore the type: torch declares both function arguments as returning None, although it uses their results.
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]


def parallel_styles(module: PlainGPT, *, sp: bool) -> dict[str, ParallelStyle]:
    """Return torch's tensor-parallel style of every submodule with parameters, by the submodule's name."""
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
    """Convert the module's parameters to DTensors on the tp mesh, by torch's `parallelize_module`."""
    parallelize_module(module, mesh, parallel_styles(module, sp=sp))
    module.tie()
    if module.part.last:
        # FSDP2 warns of views that leave a module, so the hook returns a copy of the loss.
        module.head.register_forward_hook(lambda head, inputs, loss: loss.to_local().clone())


class InFlight:
    """Number of in-flight (micro-batch, chunk) pairs of a rank, between forward and backward: current and maximum."""

    def __init__(self) -> None:
        self.now = self.most = 0


class WatchedStage(PipelineStage):
    """torch's pipeline stage with reports of its phases. Time between its passes counts as waiting for other stages."""

    flying: InFlight
    observe: Observer

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.observe(Phase.FORWARD)
        output = super().forward_one_chunk(*args, **kwargs)
        self.flying.now += 1
        self.flying.most = max(self.flying.most, self.flying.now)
        self.observe(Phase.IDLE)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.observe(Phase.BACKWARD)
        super().backward_one_chunk(*args, **kwargs)
        self.flying.now -= 1
        self.observe(Phase.IDLE)


class TorchPipeline:
    """torch's pipeline stages of one rank, one for each chunk of layers, and their schedule."""

    def __init__(
        self, experiment: Experiment, modules: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device
    ):
        layout = experiment.layout
        self.layout, self.flying = layout, InFlight()
        self.last = mesh.get_local_rank("pp") == layout.pp - 1
        self.scale = torch.ones((), device=device)
        seq = experiment.seq // layout.tp if layout.sp else experiment.seq
        between = torch.empty(
            layout.micro_batch, seq, experiment.model.hidden, dtype=DTYPES[layout.precision], device="meta"
        )
        tokens = torch.empty(layout.micro_batch, experiment.seq, dtype=torch.int64, device="meta")
        total = layout.pp * layout.chunks
        self.stages: list[Any] = []
        for chunk, module in enumerate(modules):
            number = chunk * layout.pp + mesh.get_local_rank("pp")
            stage = WatchedStage(
                module,
                number,
                total,
                device,
                input_args=between.clone().requires_grad_() if number else tokens,
                output_args=between.clone().requires_grad_()
                if number < total - 1
                else torch.empty((), device="meta").requires_grad_(),
                group=mesh.get_group("pp"),
            )
            stage.flying = self.flying
            self.stages.append(stage)
        settings: dict[str, Any] = {
            "n_microbatches": layout.accumulation,
            # The output of the last pipeline stage is the mean loss, so the target of torch's loss function is unused.
            "loss_fn": lambda loss, _: loss * self.scale,
            "scale_grads": False,
        }
        self.schedule: Any
        if layout.schedule == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(self.stages, **settings)
        else:
            kind = ScheduleGPipe if layout.schedule == "gpipe" else Schedule1F1B
            self.schedule = kind(self.stages[0], **settings)

    def run(self, micro_batches: Sequence[MicroBatch], scale: Tensor | None, observe: Observer) -> Tensor:
        """Run forward and backward of all micro-batches; return the mean loss (0-dim fp32; 0 except on the last stage).

        The gradients are those of the mean loss, multiplied by `scale` (0-dim) if it is given.
        """
        self.scale = torch.full_like(self.scale, 1 / len(micro_batches))
        if scale is not None:
            self.scale *= scale
        for stage in self.stages:
            stage.observe = observe
        joined = torch.cat([batch.tokens for batch in micro_batches])
        losses: list[Tensor] = []
        observe(Phase.IDLE)
        # A target is passed because torch's last stage calls the loss function only with a target.
        inputs = (joined,) if self.stages[0].is_first else ()
        self.schedule.step(*inputs, target=joined if self.last else None, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros_like(self.scale)
        return torch.stack([loss.detach() for loss in losses]).sum() / (1.0 if scale is None else scale)
