"""The plain module's parameters by the suite's names: the same start to the bit, and the way back.

Names differ in form alone (`qkv.weight` is `qkv`, `qkv.bias` is `qkv_bias`), values in the rows of `qkv`: ours are
query, key, value of all heads [3, a d, ...], the plain module's those of one head after the other [a 3 d, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from repro.config import Experiment, Layout, Model
from repro.engines.torch.model import PlainGPT
from repro.model.gpt import GPT, initial_values
from repro.parallel import mesh as meshes


def name_of(name: str) -> str:
    """Of a parameter of the plain module in the suite's model."""
    if name == "head.output.weight":
        return "embed.tokens"
    module, _, kind = name.rpartition(".")
    return module if kind == "weight" else f"{module}_{kind}"


def to_plain(name: str, value: Tensor, model: Model) -> Tensor:
    """The suite's parameter `name` as the plain module holds it."""
    if ".qkv" not in name:
        return value
    heads = value.view(3, model.heads, model.head_width, *value.shape[2:])
    return heads.transpose(0, 1).flatten(0, 2)


def from_plain(name: str, value: Tensor, model: Model) -> Tensor:
    """The plain module's parameter as the suite's parameter `name`."""
    if ".qkv" not in name:
        return value
    heads = value.view(model.heads, 3, model.head_width, *value.shape[1:])
    return heads.transpose(0, 1).flatten(1, 2)


def initialise(module: PlainGPT, experiment: Experiment, device: torch.device) -> None:
    """Give the module's parameters, which may be sharded in any way, their first values, one whole value at a time."""
    first = _first_values(module, experiment)
    with torch.no_grad():
        for plain, parameter in module.named_parameters():
            name = name_of(plain)
            whole = to_plain(name, first[name](device), experiment.model)
            if isinstance(parameter, DTensor):
                shards = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(shards.to_local())
            else:
                parameter.copy_(whole)


def _first_values(module: PlainGPT, experiment: Experiment) -> dict[str, Callable[[torch.device], Tensor]]:
    """By our names, what makes the whole first value of each parameter of the suite's own model of this part."""
    tp = meshes.single().tp
    model = GPT(experiment.model, Layout(), experiment.training, tp, part=module.part)
    names = [getattr(p, "name_in_model", name) for name, p in model.named_parameters()]
    parameters = list(model.parameters())

    def make(i: int, device: torch.device) -> Tensor:
        settings = {"seed": experiment.training.seed, "layers": experiment.model.layers}
        values = initial_values(names, parameters, **settings, rank=0, ranks=1, device=device)
        return values(i, 0, parameters[i].numel()).view(parameters[i].shape)

    return {name: partial(make, i) for i, name in enumerate(names)}
