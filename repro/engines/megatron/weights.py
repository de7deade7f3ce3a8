"""megatron-core's parameters in our names and shapes, and back.

A rank's share is the same rows or columns in both.  One matrix differs: its query, key and value are one after
the other within each head, [a/t, 3, d, h]; ours are three matrices, [3, a/t, d, h].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.config import Experiment
from repro.model.gpt import GPT, initial_values
from repro.parallel.mesh import Mesh

OUTER = {
    "embedding.word_embeddings.weight": "embed.tokens",
    "embedding.position_embeddings.weight": "embed.positions",
    "decoder.final_layernorm.weight": "head.norm",
    "decoder.final_layernorm.bias": "head.norm_bias",
    "output_layer.weight": "embed.tokens",
}
"""Its names outside of layers and ours; both copies of the tied embedding have the same."""
IN_A_LAYER = {
    "input_layernorm.weight": "attention.norm",
    "input_layernorm.bias": "attention.norm_bias",
    "self_attention.linear_qkv.weight": "attention.qkv",
    "self_attention.linear_qkv.bias": "attention.qkv_bias",
    "self_attention.linear_proj.weight": "attention.out",
    "self_attention.linear_proj.bias": "attention.out_bias",
    "pre_mlp_layernorm.weight": "mlp.norm",
    "pre_mlp_layernorm.bias": "mlp.norm_bias",
    "mlp.linear_fc1.weight": "mlp.up",
    "mlp.linear_fc1.bias": "mlp.up_bias",
    "mlp.linear_fc2.weight": "mlp.down",
    "mlp.linear_fc2.bias": "mlp.down_bias",
}


def named(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a GPTModel by our names."""
    layers = model.decoder.layers
    for name, parameter in model.named_parameters():
        if name in OUTER:
            yield OUTER[name], parameter
        else:
            index, _, rest = name.removeprefix("decoder.layers.").partition(".")
            yield f"blocks.{layers[int(index)].layer_number - 1}.{IN_A_LAYER[rest]}", parameter


def to_ours(name: str, value: Tensor, heads: int) -> Tensor:
    """Its parameter in our shape; `heads` is a/t."""
    if not _is_qkv(name):
        return value
    return value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)


def to_theirs(name: str, value: Tensor, heads: int) -> Tensor:
    """Our parameter in its shape."""
    if not _is_qkv(name):
        return value
    return value.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2)


def _is_qkv(name: str) -> bool:
    return name.endswith(("attention.qkv", "attention.qkv_bias"))


def load(models: Sequence[Any], initial: Callable[[str], Tensor], heads: int) -> None:
    """Give the parts of the model their first weights."""
    for model in models:
        for name, parameter in named(model):
            parameter.data.copy_(to_theirs(name, initial(name), heads))


def load_masters(models: Sequence[Any], initial: Callable[[str], Tensor], heads: int, optimizer: Any) -> None:
    """Give the optimizer the same weights where it has fp32 copies: it made them of what had been rounded.

    The distributed optimizer's are the stretch of each flat parameter that this rank updates.
    """
    (inner,) = optimizer.chained_optimizers
    for model in models:
        for name, parameter in named(model):
            master = getattr(parameter, "main_param", None)
            if master is None:
                continue
            value = to_theirs(name, initial(name), heads)
            if getattr(parameter, "main_param_sharded", False):
                mine = inner._get_model_param_range_map(parameter)["param"]
                value = value.flatten()[mine.start : mine.end]
            master.data.copy_(value)


def initial(experiment: Experiment, mesh: Mesh, device: torch.device) -> Callable[[str], Tensor]:
    """The first value of a parameter of this tp rank, fp32, by our name, in our shape."""
    model = GPT(experiment.model, experiment.layout, experiment.training, mesh.tp)
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
    place = {name: i for i, name in enumerate(names)}

    def value(name: str) -> Tensor:
        parameter = parameters[place[name]]
        return values(place[name], 0, parameter.numel()).view(parameter.shape)

    return value
