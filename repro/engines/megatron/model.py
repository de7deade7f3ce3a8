"""Configuration of megatron-core's GPTModel on a rank, and conversion of its parameters to those of this suite's GPT.

Only the qkv matrix differs: the library stores query, key and value of each head together, [a/t, 3, d, h] for a heads
of width d on t tp ranks, and the suite stores three matrices, [3, a/t, d, h].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from repro.config import Experiment
from repro.engines.frameworks.rules import load_framework
from repro.engines.frameworks.table import settings_of
from repro.model.gpt import GPT, initial_values
from repro.parallel.mesh import Mesh
from repro.parallel.storage import DTYPES


def transformer_config(experiment: Experiment, device: torch.device, timers: Any) -> TransformerConfig:
    """Return megatron-core's configuration of the model, and of its tensor and pipeline parallelism.

    On CUDA the library compiles (`jit_fuser`) fused operators; on CPUs torch's operators run. Matrix products do not
    accumulate gradients (`gradient_accumulation_fusion`), because this needs APEX.
    """
    layout = experiment.layout
    interleaved, fuse = layout.chunks > 1, device.type == "cuda"
    return TransformerConfig(
        **_options(TransformerConfig, experiment),
        activation_func=F.gelu if fuse else partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=fuse,  # The fused GELU uses the tanh approximation too.
        bias_dropout_fusion=fuse,
        cross_entropy_loss_fusion=fuse,
        # If this option is false, the gradient norm omits split weights of tp ranks after the first (Megatron-LM#4084).
        perform_initialization=True,
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        # Parameters are created in fp32, because Float16Module rounds the loaded weights afterwards.
        params_dtype=torch.float32,
        pipeline_dtype=DTYPES[layout.precision],
        virtual_pipeline_model_parallel_size=layout.chunks if interleaved else None,
        overlap_p2p_comm=interleaved and layout.overlap,
        batch_p2p_comm=not (interleaved and layout.overlap),
        deallocate_pipeline_outputs=layout.pp > 1,
        gradient_accumulation_fusion=False,
        barrier_with_L1_time=False,
        timers=timers,
    )


def _options(kind: type, experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's Megatron-LM command-line options that are fields of the configuration class `kind`."""
    names = {field.name for field in fields(kind)}
    options = load_framework("megatron").options_of(settings_of(experiment))
    return {name: value for name, value in options.items() if name in names}


def _keep(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight without initialising it, because the engine sets the initial values later."""
    return weight


def data_parallel_config(experiment: Experiment) -> DistributedDataParallelConfig:
    """Return megatron-core's configuration of gradient buffers; bf16 gradients are summed in fp32, as by default."""
    layout = experiment.layout
    in_fp32 = layout.precision != "fp16" or layout.grad_dtype == "fp32"
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32,
        overlap_grad_reduce=layout.overlap and layout.dp > 1,
        overlap_param_gather=overlaps_gather(experiment),
        use_distributed_optimizer=layout.zero == 1,
        # megatron-core's bucket size is in elements.
        bucket_size=max(1, layout.bucket_bytes // (4 if in_fp32 else 2)),
    )


def overlaps_gather(experiment: Experiment) -> bool:
    """Return whether the all-gather of updated parameters (ZeRO stage 1) overlaps with the next forward pass."""
    layout = experiment.layout
    return layout.zero == 1 and layout.dp > 1 and layout.overlap and layout.gather_overlap


def optimizer_config(experiment: Experiment) -> OptimizerConfig:
    """Return megatron-core's configuration of AdamW, clipping and loss scale; each step sets the learning rate."""
    layout, training = experiment.layout, experiment.training
    shared = _options(OptimizerConfig, experiment)
    # Without a clipping limit, infinity lets the library compute the norm without clipping.
    shared |= {
        "clip_grad": training.clip or float("inf"),
        "overlap_param_gather": overlaps_gather(experiment),
    }
    return OptimizerConfig(
        optimizer="adam", params_dtype=DTYPES[layout.precision], min_loss_scale=1.0, **shared
    )


def non_default_settings(configuration: Any) -> dict[str, Any]:
    """Return the settings of a configuration object that differ from their defaults, as JSON data."""
    found = {}
    for field in fields(configuration):
        value = getattr(configuration, field.name, None)
        value = str(value) if isinstance(value, torch.dtype) else value
        if isinstance(value, (bool, int, float, str)) and value != field.default:
            found[field.name] = value
    return found


class CausalAttention(nn.Module):
    """torch's fused causal attention. It replaces megatron-core's unfused `DotProductAttention`, which needs CUDA."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the attention [s, b, a/t * d] of queries, keys and values [s, b, a/t, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """torch's layer norm with the attribute `sequence_parallel`, for which megatron-core sums gradients over tp.

    Without APEX megatron-core uses torch's layer norm too, but without support for sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *_: Any, **__: Any):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_modules(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layer specifications of a model chunk with torch's attention and, without APEX, torch's layer norm."""
    spec = get_gpt_layer_local_spec()
    layer = spec.submodules
    attention = layer.self_attention
    attention.submodules = replace(attention.submodules, core_attention=CausalAttention)
    norm = SequenceParallelLayerNorm if layer.input_layernorm is WrappedTorchNorm else layer.input_layernorm
    spec.submodules = replace(layer, input_layernorm=norm, pre_mlp_layernorm=norm)
    count = get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)


def build_chunks(experiment: Experiment, config: TransformerConfig) -> list[GPTModel]:
    """Return one megatron-core GPTModel for each chunk of this rank's pipeline stage, with undefined weights."""
    model, layout = experiment.model, experiment.layout
    # The position embedding draws random weights, even if unused. `fork_rng` restores the process's random state.
    with torch.random.fork_rng():
        return [
            GPTModel(
                config,
                block_modules(config, chunk),
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


OUTER_NAMES = {
    "embedding.word_embeddings.weight": "embed.tokens",
    "embedding.position_embeddings.weight": "embed.positions",
    "decoder.final_layernorm.weight": "head.norm",
    "decoder.final_layernorm.bias": "head.norm_bias",
    "output_layer.weight": "embed.tokens",
}
"""Name in this suite of each parameter outside the layers, by megatron-core's name; tied copies have equal names."""
LAYER_NAMES = {
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


def named_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in this suite, parameter) of all parameters of a megatron-core GPTModel."""
    layers = model.decoder.layers
    for name, parameter in model.named_parameters():
        if name in OUTER_NAMES:
            yield OUTER_NAMES[name], parameter
        else:
            index, _, rest = name.removeprefix("decoder.layers.").partition(".")
            yield f"blocks.{layers[int(index)].layer_number - 1}.{LAYER_NAMES[rest]}", parameter


def to_suite_shape(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a megatron-core parameter in the shape of this suite's GPT; `heads`: attention heads on this tp rank."""
    if not _is_qkv(name):
        return value
    return value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)


def to_megatron_shape(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a parameter of this suite's GPT in megatron-core's shape; `heads`: attention heads on this tp rank."""
    if not _is_qkv(name):
        return value
    return value.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2)


def _is_qkv(name: str) -> bool:
    return name.endswith(("attention.qkv", "attention.qkv_bias"))


def load_weights(models: Sequence[Any], initial: Callable[[str], Tensor], heads: int) -> None:
    """Set the weights of megatron-core's model chunks to this suite's initial fp32 values, `initial(name)`."""
    for model in models:
        for name, parameter in named_parameters(model):
            parameter.data.copy_(to_megatron_shape(name, initial(name), heads))


def load_masters(models: Sequence[Any], initial: Callable[[str], Tensor], heads: int, optimizer: Any) -> None:
    """Set the optimizer's fp32 master weights, which megatron-core copies from rounded weights, to the initial values.

    The distributed optimizer has masters only for the range of each parameter that this rank updates.
    """
    (inner,) = optimizer.chained_optimizers
    for model in models:
        for name, parameter in named_parameters(model):
            master = getattr(parameter, "main_param", None)
            if master is None:
                continue
            value = to_megatron_shape(name, initial(name), heads)
            if getattr(parameter, "main_param_sharded", False):
                mine = inner._get_model_param_range_map(parameter)["param"]
                value = value.flatten()[mine.start : mine.end]
            master.data.copy_(value)


def initial_values_by_name(
    experiment: Experiment, mesh: Mesh, device: torch.device
) -> Callable[[str], Tensor]:
    """Return a function that returns a parameter's initial fp32 value on this tp rank, by its name in this suite."""
    model = GPT(experiment.model, experiment.layout, experiment.training, mesh.tp)
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = initial_values(names, parameters, experiment, mesh.tp, device)
    place = {name: i for i, name in enumerate(names)}

    def value(name: str) -> Tensor:
        parameter = parameters[place[name]]
        return values(place[name], 0, parameter.numel()).view(parameter.shape)

    return value
