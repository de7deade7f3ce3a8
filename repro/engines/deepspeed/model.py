"""The suite's GPT as DeepSpeed gets it: values, parameter groups, and blocks that its checkpointing runs again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from repro.config import Experiment
from repro.models.gpt import GPT, Place
from repro.models.init import initial_values
from repro.parallel.mesh import Mesh
from repro.parallel.zero.stages import leave_meta


class DeepSpeedGPT(GPT):
    """The GPT; with `recompute` a block runs under `deepspeed.checkpointing.checkpoint`."""

    def __init__(self, experiment: Experiment, mesh: Mesh):
        super().__init__(experiment.model, experiment.layout, experiment.training, mesh.tp)
        self.recompute = experiment.layout.recompute

    def run_block(self, block: Module, x: Tensor, place: Place, mask: Tensor | None) -> Tensor:
        if not self.recompute:
            return super().run_block(block, x, place, mask)
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        # It takes every argument but tensors for two when activations are partitioned.
        return checkpoint(partial(block, place=place, mask=mask), x)


ValuesOf = dict[str, Callable[[int, int], Tensor]]
"""Of a parameter by name the initial values of its elements start..stop, fp32."""


def build(experiment: Experiment, mesh: Mesh, device: torch.device) -> tuple[DeepSpeedGPT, ValuesOf]:
    """The model on `device`, in fp32, with the values that every engine starts from; and these once more."""
    model = DeepSpeedGPT(experiment, mesh)
    leave_meta(model, device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = initial_values(
        names,
        parameters,
        seed=experiment.training.seed,
        layers=experiment.model.layers,
        rank=mesh.tp.rank,
        ranks=mesh.tp.size,
        device=device,
    )
    for i, parameter in enumerate(parameters):
        parameter.data = values(i, 0, parameter.numel()).view(parameter.shape)
        # Of a parameter that every tp rank holds whole, one rank's gradient counts in the norm.
        parameter.model_parallel = vars(parameter)["split"] is not None
    return model, {name: partial(values, i) for i, name in enumerate(names)}


def optimizer(model: Module, experiment: Experiment) -> torch.optim.AdamW:
    """torch's fused AdamW, which DeepSpeed takes as a client's and which needs no compiler."""
    training = experiment.training
    decayed: list[Parameter] = []
    others: list[Parameter] = []
    for parameter in model.parameters():
        matrix = parameter.dim() > 1 and parameter.init != "zeros"  # type: ignore[attr-defined]
        (decayed if matrix else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = training.beta1, training.beta2
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
