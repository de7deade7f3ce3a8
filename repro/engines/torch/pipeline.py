"""Pipelines by torch.distributed.pipelining: its stages and its schedules, watched for phases and what is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from repro.config import Experiment
from repro.config.enums import Phase
from repro.engines.native.model_part import MicroBatch
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import DTYPES


class InFlight:
    """Micro-batches (per chunk) of a rank between forward and backward."""

    def __init__(self) -> None:
        self.now = self.most = 0


class WatchedStage(PipelineStage):
    """A stage that says when it computes; what is between is waiting for others, as the schedules do it."""

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
    """One rank's stages, one a chunk, under the layout's schedule."""

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
            # The last stage's output is its mean loss, and the data it needs it has.
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
        """Forward and backward of all micro-batches; the mean loss (0-dim fp32; 0 but on the last stage).

        Gradients are those of the mean loss, times `scale` (0-dim) if there is one.
        """
        self.scale = torch.full_like(self.scale, 1 / len(micro_batches))
        if scale is not None:
            self.scale *= scale
        for stage in self.stages:
            stage.observe = observe
        whole = torch.cat([batch.tokens for batch in micro_batches])
        losses: list[Tensor] = []
        observe(Phase.IDLE)
        # The first stage takes the tokens; the targets only tell the last one that there is a loss.
        inputs = (whole,) if self.stages[0].is_first else ()
        self.schedule.step(*inputs, target=whole if self.last else None, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros_like(self.scale)
        return torch.stack([loss.detach() for loss in losses]).sum() / (1.0 if scale is None else scale)
