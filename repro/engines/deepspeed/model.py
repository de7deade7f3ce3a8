"""The suite's GPT as DeepSpeed gets it: values, parameter groups, and blocks that its checkpointing runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from repro.config import Experiment, Training
from repro.engines.native.part import decays
from repro.model.gpt import GPT, BatchPosition, initial_values
from repro.model.layer import Masks
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES
from repro.parallel.zero.stages import leave_meta


class DeepSpeedGPT(GPT):
    """The GPT; with `recompute` a block runs under `deepspeed.checkpointing.checkpoint`."""

    def __init__(self, experiment: Experiment, mesh: Mesh):
        super().__init__(experiment.model, experiment.layout, experiment.training, mesh.tp)
        self.recompute = experiment.layout.recompute

    def run_block(self, block: Module, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        if not self.recompute:
            return super().run_block(block, x, place, masks)
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        # It takes every argument but tensors for two when activations are partitioned.
        return checkpoint(partial(block, place=place, masks=masks), x)


ValuesOf = dict[str, Callable[[int, int], Tensor]]
"""Of a parameter by name the initial values of its elements start..stop, fp32."""


@dataclass(frozen=True)
class Built:
    """A model that DeepSpeed can be initialised with, and what was known of it before."""

    model: DeepSpeedGPT
    values: ValuesOf
    groups: list[dict[str, Any]]
    """Parameter groups of AdamW: matrices decay, vectors do not."""
    splits: dict[str, int | None]
    """The dimension along which tp splits each parameter, by name."""
    count: int
    """Parameters of this rank's tp share."""


def build(
    experiment: Experiment, mesh: Mesh, device: torch.device, place: Callable[[Module], object] | None = None
) -> Built:
    """The model on `device`, in the layout's precision, with the values that every engine starts from.

    `place` is called with the embedding, each block and the head as soon as they have them, and may partition them.
    """
    training, dtype = experiment.training, DTYPES[experiment.layout.precision]
    model = DeepSpeedGPT(experiment, mesh)
    leave_meta(model, device, dtype)  # the parameters are new, and own no memory yet
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = initial_values(
        names,
        parameters,
        seed=training.seed,
        layers=experiment.model.layers,
        rank=mesh.tp.rank,
        ranks=mesh.tp.size,
        device=device,
    )
    decayed, others = ([p for p in parameters if decays(p) is yes] for yes in (True, False))
    built = Built(
        model,
        {name: partial(values, i) for i, name in enumerate(names)},
        [
            {"params": decayed, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        {name: vars(p)["split"] for name, p in zip(names, parameters, strict=True)},
        sum(p.numel() for p in parameters),
    )
    index_of = {id(p): i for i, p in enumerate(parameters)}
    for module in (model.embed, *model.blocks.values(), model.head):
        for parameter in module.parameters():
            i = index_of.pop(id(parameter), None)
            if i is None:
                continue  # the tied embedding, which is there
            parameter.data = values(i, 0, parameter.numel()).view(parameter.shape).to(dtype)
            # Of a parameter that every tp rank holds whole, one rank's gradient counts in the norm.
            parameter.model_parallel = vars(parameter)["split"] is not None  # type: ignore[attr-defined]
        if place is not None:
            place(module)
    return built


def optimizer(built: Built, training: Training) -> torch.optim.AdamW:
    """torch's fused AdamW, which DeepSpeed takes as a client's and which needs no compiler."""
    betas = training.beta1, training.beta2
    return torch.optim.AdamW(built.groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
