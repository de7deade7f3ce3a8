"""Part of the model on one rank, and the rules that all engines share: micro-batches, weight decay, learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Experiment, Training
from repro.model.gpt import GPT, BatchPosition, Part, initial_values
from repro.parallel.comm import Group
from repro.parallel.context import own_tokens
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Sharding, Tag
from repro.parallel.zero.stages import ShardedModule
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints

DECAYED, NOT_DECAYED = 0, 1


def decays(parameter: Parameter) -> bool:
    """Return whether weight decay applies to a GPT parameter: to matrices, but not to vectors or stacked biases."""
    return parameter.dim() > 1 and vars(parameter)["init"] != "zeros"


def learning_rate(training: Training, taken: Tensor) -> Tensor:
    """Return the learning rate (0-dim fp32) after `taken` steps (0-dim fp32, on the device).

    The schedule is a linear warm-up, then constant or cosine. The rate is computed on the device, because only the
    device has the number of steps without those skipped for an overflow.
    """
    lr = torch.full_like(taken, training.lr)
    if training.schedule == "cosine":
        span = max(1, (training.decay_steps or training.steps) - training.warmup_steps)
        progress = ((taken - training.warmup_steps) / span).clamp(0.0, 1.0)
        cosine = 0.5 * (1.0 + torch.cos(progress * math.pi))
        lr = training.min_lr + (training.lr - training.min_lr) * cosine
    if training.warmup_steps:
        lr = torch.minimum(lr, training.lr * (taken + 1) / training.warmup_steps)
    return lr


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch: tokens and targets [micro_batch, s], int64, on the engine's device, before cp divides them."""

    tokens: Tensor
    targets: Tensor
    place: BatchPosition

    def of_rank(self, cp: Group) -> MicroBatch:
        """Return the micro-batch with the tokens and targets [micro_batch, s/cp] of this context-parallel rank."""
        return replace(self, tokens=own_tokens(self.tokens, cp), targets=own_tokens(self.targets, cp))


class ModelPart:
    """Full model, or chunk of a pipeline stage, sharded by ZeRO, with the `Chunk` interface of the pipeline runner."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        device: torch.device,
        chunk: int,
        parts: Sequence[range],
        checkpoints: ActivationCheckpoints | None,
    ):
        """Build chunk number `chunk` of this pipeline stage; `parts`: layers of all parts of the model, in order."""
        layout, training = experiment.layout, experiment.training
        self.mesh = mesh
        number = chunk * mesh.pp.size + mesh.pp.rank
        part = Part(parts[number], first=number == 0, last=number == len(parts) - 1)
        self.model = GPT(experiment.model, layout, training, mesh.tp, checkpoints, part, mesh.cp)
        self.micro_batches: Sequence[MicroBatch] = ()
        """Micro-batches of the current training step."""
        self._names = {name: getattr(p, "name_in_model", name) for name, p in self.model.named_parameters()}

        def values(parameters: list[Parameter]) -> InitialValues:
            names = list(self._names.values())
            return initial_values(names, parameters, experiment, mesh.tp, device)

        sharding = Sharding.from_layout(layout, mesh.dp, device, DTYPES[layout.precision])
        self.sharded = ShardedModule(self.model, self.model.zero_units(), sharding, self._tag, values)

    def _tag(self, parameter: Parameter) -> Tag:
        """Return the tag of a parameter: its AdamW parameter group, and whether several tp or pp ranks hold it."""
        return Tag(
            group=DECAYED if decays(parameter) else NOT_DECAYED,
            duplicate=self.mesh.tp.size > 1 and parameter.split is None,  # type: ignore[attr-defined]
            tied=getattr(parameter, "tied", False),
            partial=parameter.partial,  # type: ignore[attr-defined]
        )

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Return the model part's output for one micro-batch; `x`: output of the preceding part, None for the first."""
        batch = self.micro_batches[micro_batch]
        self.sharded.begin_forward()
        output: Tensor = self.model(batch.tokens if x is None else x, batch.targets, batch.place)
        return output

    def before_backward(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare the gradient buckets for backward pass number `micro_batch` of a step's `micro_batches` passes."""
        self.sharded.begin_backward(micro_batch, micro_batches)

    def after_backward(self) -> None:
        """Start the remaining gradient reductions of the backward pass that has ended."""
        self.sharded.end_backward()

    def finish(self) -> None:
        """Wait until all gradients of the training step are reduced."""
        self.sharded.wait_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter of the part by name, gathered over dp but local to the tp rank."""
        return {self._names[name]: value for name, value in self.sharded.full_parameters().items()}

    def name_in_model(self, name: str) -> str:
        """Return the full model's name of this part's parameter `name`; a tied output matrix is the embedding."""
        return self._names[name]

    def splits(self) -> dict[str, int | None]:
        """Return the dimension along which tp splits each parameter (None: not split), by its name in the model."""
        return {self._names[name]: vars(p)["split"] for name, p in self.model.named_parameters()}
