"""megatron-core's GPTModel, in the parts that a rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from repro.config import Experiment


class CausalAttention(nn.Module):
    """torch's fused causal attention in place of the library's `DotProductAttention`.

    That one writes the scores into a buffer shared by all layers, on CUDA only; and on CUDA as here the library
    recommends a fused attention (Transformer Engine's).
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, b, a/t, d] of each to [s, b, a/t d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class LayerNorm(nn.LayerNorm):
    """torch's, as the library has it without APEX, under sequence parallelism too.

    There it refuses torch's, though all that its own adds is the mark by which the gradients of weight and bias,
    of a part of the sequence on each rank, are summed over tp.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *_: Any, **__: Any):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """The library's own layers, as many as the chunk has, with `CausalAttention` and, without APEX, `LayerNorm`."""
    spec = get_gpt_layer_local_spec()
    layer = spec.submodules
    attention = layer.self_attention
    attention.submodules = replace(attention.submodules, core_attention=CausalAttention)
    norm = LayerNorm if layer.input_layernorm is WrappedTorchNorm else layer.input_layernorm
    spec.submodules = replace(layer, input_layernorm=norm, pre_mlp_layernorm=norm)
    count = get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)


def build(experiment: Experiment, config: TransformerConfig) -> list[GPTModel]:
    """One GPTModel a chunk, with undefined weights."""
    model, layout = experiment.model, experiment.layout
    # Its position embedding draws its weights whatever is asked; the process's generator is not the library's.
    with torch.random.fork_rng():
        return [
            GPTModel(
                config,
                block(config, chunk),
                vocab_size=model.vocab,
                max_sequence_length=model.seq,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
                share_embeddings_and_output_weights=True,
                position_embedding_type="learned_absolute",
                vp_stage=chunk,
            )
            for chunk in (range(layout.chunks) if layout.chunks > 1 else [None])
        ]
