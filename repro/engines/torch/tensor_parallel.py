"""Tensor and sequence parallelism by DTensor: which module is split how (`parallelize_module`).

The split is Megatron's (1909.08053 sec. 3): queries, keys, values and the MLP's first matrix by columns, `out` and
`down` by rows, the embedding and the logits by vocabulary, with the cross-entropy computed on parts of the logits
(`loss_parallel`).  With sequence parallelism norms see their part of the sequence, without they are duplicates.
Every parameter becomes a DTensor of the tp mesh, so that norms and optimizer treat all alike.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from repro.engines.torch.model import PlainGPT


class Duplicate(ParallelStyle):
    """Every rank computes the whole module on the same input; `output` is what it passes on, as a local tensor."""

    def __init__(self, output: Placement | None = None):
        super().__init__()
        self.output = output or Replicate()

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[self.output]).to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Both are annotated as if what they return were not used.
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]


def plan(module: PlainGPT, *, sp: bool) -> dict[str, ParallelStyle]:
    """The style of every module that has parameters, by its name."""
    between = Shard(1) if sp else Replicate()
    found: dict[str, ParallelStyle] = {}

    def norm(name: str) -> None:
        found[name] = SequenceParallel() if sp else Duplicate()

    if module.part.first:
        found["embed.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        found["embed.positions"] = Duplicate(Shard(0)) if sp else Duplicate()
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


def split(module: PlainGPT, mesh: DeviceMesh, *, sp: bool) -> None:
    """Make the module's parameters DTensors of the tp mesh."""
    parallelize_module(module, mesh, plan(module, sp=sp))
    module.tie()
    if module.part.last:
        # The loss is the same on all ranks; FSDP2 warns of views that leave a module.
        module.head.register_forward_hook(lambda head, inputs, loss: loss.to_local().clone())
