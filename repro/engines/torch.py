"""PyTorch's own strategies on the same model, to compare with: DDP, ZeroRedundancyOptimizer, FSDP2.

| stage | what runs |
|---|---|
| 0 | DistributedDataParallel, AdamW |
| 1 | DistributedDataParallel, ZeroRedundancyOptimizer(AdamW) |
| 2 | FSDP2, parameters kept between forward and backward (`reshard_after_forward=False`) |
| 3 | FSDP2 |

What else a layout may not ask of it is in `repro.config.engines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from repro.config import Experiment, Layout
from repro.config.enums import Category, Phase
from repro.engines.about import EngineReport
from repro.models.gpt import GPT
from repro.models.init import initial_values
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import mark
from repro.parallel.zero.optimizer import Norms
from repro.parallel.zero.stages import leave_meta
from repro.parallel.zero_r.partitioned_activations import Checkpoints
from repro.train.part import MicroBatch

STRATEGIES = (
    "DistributedDataParallel",
    "DistributedDataParallel, ZeroRedundancyOptimizer",
    "FSDP2, reshard_after_forward=False",
    "FSDP2",
)
"""By stage."""


class TorchEngine:
    """The suite's GPT under torch's strategies; the same `Engine` interface as ours."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.clip, self.mesh, self.stage = training.clip, mesh, layout.zero
        checkpoints = Checkpoints(layout, mesh.tp, experiment.model.layers) if layout.recompute else None
        model = GPT(experiment.model, layout, training, mesh.tp, checkpoints)
        leave_meta(model, device)
        names, parameters = zip(*model.named_parameters(), strict=True)
        values = initial_values(
            names,
            parameters,
            seed=training.seed,
            layers=experiment.model.layers,
            rank=0,
            ranks=1,
            device=device,
        )
        with torch.no_grad():
            for i, parameter in enumerate(parameters):
                parameter.data = values(i, 0, parameter.numel()).view(parameter.shape)
        self.count = sum(p.numel() for p in parameters)
        self.names = list(names)
        self.model = self._wrap(model, layout)
        self.optimizer = self._optimizer(experiment)

    def _wrap(self, model: GPT, layout: Layout) -> Any:
        if self.mesh.dp.size == 1:
            return model
        if self.stage < 2:
            return DistributedDataParallel(
                model,
                bucket_cap_mb=layout.bucket_bytes / 2**20,
                gradient_as_bucket_view=layout.gradient_as_bucket_view,
                static_graph=True,
            )
        from torch.distributed.fsdp import fully_shard

        again = self.stage == 3
        for block in model.blocks.values():
            fully_shard(block, reshard_after_forward=again)
        fully_shard(model, reshard_after_forward=again)
        return model

    def _optimizer(self, experiment: Experiment) -> Any:
        training = experiment.training
        decayed: list[Parameter] = []
        others: list[Parameter] = []
        for name, parameter in self.model.named_parameters():
            vector = parameter.dim() == 1 or name.endswith("bias")
            (others if vector else decayed).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        settings: dict[str, Any] = {
            "lr": training.lr,
            "betas": (training.beta1, training.beta2),
            "eps": training.eps,
        }
        if self.stage == 1 and self.mesh.dp.size > 1:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, fused=True, **settings)
        return torch.optim.AdamW(groups, fused=True, **settings)

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """The step as torch's documentation writes it, with clipping and the mean loss over replicas."""
        count = len(micro_batches)
        total: Tensor | None = None
        for i, batch in enumerate(micro_batches):
            observe(Phase.FORWARD)
            last = i == count - 1
            if self.stage >= 2 and self.mesh.dp.size > 1:
                self.model.set_requires_gradient_sync(last)
            quiet = self.stage < 2 and not last and self.mesh.dp.size > 1
            with self.model.no_sync() if quiet else nullcontext():
                loss = self.model(batch.tokens, batch.targets, batch.place)
                observe(Phase.BACKWARD)
                (loss / count if count > 1 else loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        observe(Phase.OPTIMIZER)
        assert total is not None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = total / (count * self.mesh.dp.size)
        if self.mesh.dp.size > 1:
            dist.all_reduce(mean)
        # FSDP2's norm is a DTensor whose parts have to be added up.
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return Norms(whole, mean, torch.zeros_like(mean))

    def loss_scale(self) -> Tensor | None:
        """fp32 needs none."""
        return None

    def synchronize(self) -> None:
        """torch's steps leave nothing under way."""

    def local_parameters(self) -> int:
        """Parameters of the model."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every parameter by name."""
        module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found = {}
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[name] = whole.detach().clone()
        return found

    def padding(self) -> int:
        """Not known of torch's buffers."""
        return 0

    def mark_states(self) -> None:
        """Parameters, their gradients and Adam's moments; FSDP2's are the rank's shards."""
        for parameter in self.model.parameters():
            mark(_local(parameter), Category.PARAMETERS)
            if parameter.grad is not None:
                mark(_local(parameter.grad), Category.GRADIENTS)
        sharded = getattr(
            self.optimizer, "optim", self.optimizer
        )  # of ZeroRedundancyOptimizer: the rank's part
        for state in sharded.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    mark(_local(value), Category.OPTIMIZER)

    def about(self) -> EngineReport:
        """torch's strategies on this suite's model."""
        return EngineReport(
            f"torch {torch.__version__}",
            "data parallelism and optimizer; the model and its kernels are this suite's",
            {"strategy": STRATEGIES[self.stage] if self.mesh.dp.size > 1 else "one replica"},
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Nothing: there is one stage."""
        return {}


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
