"""The suite's GPT for DeepSpeed: initial values, parameter groups, and blocks under DeepSpeed's checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from repro.config import Experiment, Training
from repro.engines.native.model_part import decays
from repro.model.gpt import GPT, BatchPosition, initial_values
from repro.model.layer import Masks
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES
from repro.parallel.zero.stages import leave_meta


class DeepSpeedGPT(GPT):
    """GPT whose blocks run under `deepspeed.checkpointing.checkpoint` with `recompute`."""

    def __init__(self, experiment: Experiment, mesh: Mesh):
        super().__init__(experiment.model, experiment.layout, experiment.training, mesh.tp)
        self.recompute = experiment.layout.recompute

    def run_block(self, block: Module, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        if not self.recompute:
            return super().run_block(block, x, place, masks)
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        # With partitioned activations DeepSpeed accepts tensor arguments only.
        return checkpoint(partial(block, place=place, masks=masks), x)


InitialValuesByName = dict[str, Callable[[int, int], Tensor]]
"""Functions by parameter name that return the initial values of the elements start..stop, fp32."""


@dataclass(frozen=True)
class DeepSpeedModel:
    """Model for `deepspeed.initialize`, and its properties before the partitioning."""

    model: DeepSpeedGPT
    values: InitialValuesByName
    groups: list[dict[str, Any]]
    """Parameter groups of AdamW: matrices decay, vectors do not."""
    splits: dict[str, int | None]
    """Dimension along which tp splits each parameter, by name."""
    count: int
    """Parameters of this rank's tp share."""


def build_model(
    experiment: Experiment, mesh: Mesh, device: torch.device, place: Callable[[Module], object] | None = None
) -> DeepSpeedModel:
    """Return the model on `device` in the layout's precision, with the initial values of all engines.

    `place` is called with the embedding, each block and the head after their initialisation, and may partition them.
    """
    training, dtype = experiment.training, DTYPES[experiment.layout.precision]
    model = DeepSpeedGPT(experiment, mesh)
    leave_meta(model, device, dtype)  # the new parameters own no memory
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
    built = DeepSpeedModel(
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
                continue  # the tied embedding is already initialised
            parameter.data = values(i, 0, parameter.numel()).view(parameter.shape).to(dtype)
            # The norm counts the gradient of a replicated parameter on one tp rank.
            parameter.model_parallel = vars(parameter)["split"] is not None  # type: ignore[attr-defined]
        if place is not None:
            place(module)
    return built


def fused_adamw(built: DeepSpeedModel, training: Training) -> torch.optim.AdamW:
    """Return torch's fused AdamW, which DeepSpeed accepts as a client optimizer and which needs no compiler."""
    betas = training.beta1, training.beta2
    return torch.optim.AdamW(built.groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
