"""A part of the model on one rank: a pipeline stage's chunk, or the whole, with its sharded states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Experiment
from repro.model.gpt import GPT, BatchPosition, Part, initial_values
from repro.parallel.comm import Group
from repro.parallel.context import own_tokens
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Tag
from repro.parallel.zero.stages import ShardedModule, Sharding
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints

DECAYED, NOT_DECAYED = 0, 1


def decays(parameter: Parameter) -> bool:
    """Whether weight decay acts on a parameter of the suite's GPT: on matrices, not on vectors (three biases too)."""
    return parameter.dim() > 1 and vars(parameter)["init"] != "zeros"


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and targets [micro_batch, s], int64, on the engine's device: whole samples, of which each rank of cp takes
    its part."""

    tokens: Tensor
    targets: Tensor
    place: BatchPosition

    def of_rank(self, cp: Group) -> MicroBatch:
        """The tokens [micro_batch, s/cp] of one rank of cp."""
        return replace(self, tokens=own_tokens(self.tokens, cp), targets=own_tokens(self.targets, cp))


class ModelPart:
    """What the pipeline's runner calls: see `repro.parallel.pipeline.runner.Chunk`."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        device: torch.device,
        chunk: int,
        parts: Sequence[range],
        checkpoints: ActivationCheckpoints | None,
    ):
        """`parts` are the layers of all parts of the model, in its order."""
        layout, training = experiment.layout, experiment.training
        self.mesh = mesh
        number = chunk * mesh.pp.size + mesh.pp.rank
        part = Part(parts[number], first=number == 0, last=number == len(parts) - 1)
        self.model = GPT(experiment.model, layout, training, mesh.tp, checkpoints, part, mesh.cp)
        self.micro_batches: Sequence[MicroBatch] = ()
        """Of the current step."""
        self._names = {name: getattr(p, "name_in_model", name) for name, p in self.model.named_parameters()}

        def values(parameters: list[Parameter]) -> InitialValues:
            return initial_values(
                list(self._names.values()),
                parameters,
                seed=training.seed,
                layers=experiment.model.layers,
                rank=mesh.tp.rank,
                ranks=mesh.tp.size,
                device=device,
            )

        sharding = Sharding.of(layout, mesh.dp, device, DTYPES[layout.precision])
        self.sharded = ShardedModule(self.model, self.model.zero_units(), sharding, self._tag, values)

    def _tag(self, parameter: Parameter) -> Tag:
        """What several ranks of tp or pp hold is counted once."""
        return Tag(
            group=DECAYED if decays(parameter) else NOT_DECAYED,
            duplicate=self.mesh.tp.size > 1 and parameter.split is None,  # type: ignore[attr-defined]
            tied=getattr(parameter, "tied", False),
            partial=parameter.partial,  # type: ignore[attr-defined]
        )

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """The part's output for one micro-batch; `x` comes from the part before, None for the first."""
        batch = self.micro_batches[micro_batch]
        self.sharded.begin_forward()
        output: Tensor = self.model(batch.tokens if x is None else x, batch.targets, batch.place)
        return output

    def before_backward(self, micro_batch: int, micro_batches: int) -> None:
        """The `micro_batch`-th backward pass of the step begins."""
        self.sharded.begin_backward(micro_batch, micro_batches)

    def after_backward(self) -> None:
        """All gradients of that pass are there: begin to reduce what has not been yet."""
        self.sharded.end_backward()

    def finish(self) -> None:
        """Have the step's gradients reduced."""
        self.sharded.wait_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every (tp-local) parameter, complete, by its name in the model."""
        return {self._names[name]: value for name, value in self.sharded.full_parameters().items()}

    def name_in_model(self, name: str) -> str:
        """What the whole model calls the parameter that this part calls `name`."""
        return self._names[name]

    def splits(self) -> dict[str, int | None]:
        """The dimension along which tp splits each parameter, by its name in the model."""
        return {self._names[name]: vars(p)["split"] for name, p in self.model.named_parameters()}
