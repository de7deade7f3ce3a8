"""Model families of Hugging Face transformers that can be read and written (`FAMILIES`).

The functions of a family are `_NAME_sizes` (configuration to keys of `Model`), `_NAME_layer` (tensors of a layer) and
`_NAME_configuration` (model to configuration keys).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from repro.config import ConfigError, Model
from repro.quality.weights import family
from repro.quality.weights.family import Config, Family
from repro.quality.weights.source import Counterpart, RowRange, counterpart

DEFAULT_CONTEXT_TOKENS = 2048
"""Context length, in tokens, of a BLOOM or Falcon model whose configuration gives no length."""
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Tensor names of the norms before attention and before the MLP in a layer of GPT-NeoX and BLOOM."""


# GPT-2 stores matrices as `Conv1D` [in, out], and query, key and value as the columns of one matrix.


def _gpt2_layer(model: Model, i: int) -> Iterator[Counterpart]:
    h, f, inner = model.hidden, model.ffn_width, model.heads * model.head_width
    for part, name, linears in (
        ("attention", "ln_1", (("qkv", "attn.c_attn", h, 3 * inner), ("out", "attn.c_proj", inner, h))),
        ("mlp", "ln_2", (("up", "mlp.c_fc", h, f), ("down", "mlp.c_proj", f, h))),
    ):
        ours, theirs = f"blocks.{i}.{part}", f"h.{i}"
        yield from family.norm_counterparts(f"{theirs}.{name}", f"{ours}.norm", model)
        for matrix, conv, inputs, outputs in linears:
            yield counterpart(f"{theirs}.{conv}.weight", f"{ours}.{matrix}", inputs, outputs, transposed=True)
            yield counterpart(f"{theirs}.{conv}.bias", f"{ours}.{matrix}_bias", outputs)


GPT2 = Family(
    name="GPT-2",
    types=("gpt2",),
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    head="lm_head.weight",
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    tokens="wte.weight",
    positions="wpe.weight",
    norms={"ln_f": "head.norm"},
    keys={
        "layers": ("n_layer",),
        "hidden": ("n_embd",),
        "heads": ("n_head",),
        "seq": ("n_positions", "n_ctx"),
    },
    norm_eps=("layer_norm_epsilon", 1e-5),
    gelu=("activation_function", "gelu_new"),
    sizes=lambda config: {"ffn": config.get("n_inner") or 0},
    layer=_gpt2_layer,
    configuration=lambda model: {"n_ctx": model.seq, "n_inner": model.ffn_width},
    ignored=re.compile(r"h\.\d+\.attn\.(?:masked_)?bias"),
)


# Llama, Mistral and Qwen2 store each projection as a separate matrix. Only Qwen2 has biases (query, key and value).


COMMON_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "ffn": ("intermediate_size",),
    "seq": ("max_position_embeddings",),
}
"""Configuration keys that Llama and GPT-NeoX have in common, by the field of `Model` that they set."""


def _llama_sizes(config: Config) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width, keys = config.get("head_dim") or 0, config.get("num_key_value_heads") or heads
    qwen2 = config["model_type"] == "qwen2"
    seq = config["max_position_embeddings"]
    if qwen2 and config.get("use_sliding_window"):
        right = "false, since this suite's GPT does not support sliding-window attention"
        raise ConfigError("use_sliding_window", True, right)
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        # Sequences up to the size of the sliding window have full attention.
        seq = min(seq, config["sliding_window"])
    return {
        "kv_heads": keys if keys != heads else 0,
        "head_dim": width if width * heads != hidden else 0,
        "seq": seq,
        "norm": "rms",
        "mlp": "swiglu",
        "biases": "qkv" if qwen2 else "none",
        **family.rotary_sizes(config),
    }


def _llama_layer(model: Model, i: int) -> Iterator[Counterpart]:
    theirs, attention, mlp = f"layers.{i}", f"blocks.{i}.attention", f"blocks.{i}.mlp"
    h, f, biased = model.hidden, model.ffn_width, model.biases == "qkv"
    inner = model.heads * model.head_width
    yield from family.norm_counterparts(f"{theirs}.input_layernorm", f"{attention}.norm", model)
    for k, name in enumerate("qkv"):
        rows = _qkv_rows(attention, model, k)
        yield from family.linear_counterparts(f"{theirs}.self_attn.{name}_proj", h, *rows, biased=biased)
    yield counterpart(f"{theirs}.self_attn.o_proj.weight", f"{attention}.out", h, inner)
    yield from family.norm_counterparts(f"{theirs}.post_attention_layernorm", f"{mlp}.norm", model)
    for name, first in (("gate", 0), ("up", f)):
        yield Counterpart(f"{theirs}.mlp.{name}_proj.weight", (f, h), (RowRange(f"{mlp}.up", first, f),))
    yield counterpart(f"{theirs}.mlp.down_proj.weight", f"{mlp}.down", h, f)


def _qkv_rows(block: str, model: Model, k: int) -> list[RowRange]:
    """Return the rows of this suite's attention parameters that contain query, key or value (`k` = 0, 1, 2)."""
    width, inner = model.head_width, model.heads * model.head_width
    if model.key_heads == model.heads:
        return [RowRange(f"{block}.qkv", k * inner, inner)]
    if k == 0:
        return [RowRange(f"{block}.q", 0, inner)]
    # The parameter `kv` stores the key rows of a head, then its value rows, head by head.
    firsts = range((k - 1) * width, 2 * model.key_heads * width, 2 * width)
    return [RowRange(f"{block}.kv", first, width) for first in firsts]


def _llama_configuration(model: Model) -> dict[str, Any]:
    return {
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_width,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }


LLAMA = Family(
    name="Llama",
    types=("llama", "mistral"),
    architecture="LlamaForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    tokens="embed_tokens.weight",
    norms={"norm": "head.norm"},
    keys=COMMON_KEYS,
    norm_eps=("rms_norm_eps", 1e-6),
    tied=False,
    sizes=_llama_sizes,
    layer=_llama_layer,
    configuration=_llama_configuration,
    ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
QWEN2 = replace(
    LLAMA, name="Qwen2", types=("qwen2",), architecture="Qwen2ForCausalLM", fixed={"hidden_act": "silu"}
)


# GPT-NeoX and Pythia store query, key and value in one matrix, head by head.


def _neox_sizes(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "blocks": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "rotary_fraction": float(rope.get("partial_rotary_factor") or config.get("rotary_pct", 0.25)),
        **family.rotary_sizes(config),
    }


def _neox_configuration(model: Model) -> dict[str, Any]:
    turned = {"rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_fraction}
    return {
        "use_parallel_residual": model.blocks == "parallel",
        "rotary_pct": model.rotary_fraction,
        "rotary_emb_base": model.rotary_base,
        "rope_parameters": {"rope_type": "default", **turned},
    }


NEOX = Family(
    name="GPT-NeoX",
    types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    fixed={"attention_bias": True},
    tokens="embed_in.weight",
    norms={"final_layer_norm": "head.norm"},
    keys=COMMON_KEYS,
    norm_eps=("layer_norm_eps", 1e-5),
    gelu=("hidden_act", "gelu"),
    tied=False,
    sizes=_neox_sizes,
    layer=partial(family.fused_layer, stem="layers", attention="attention", norms=NORMS),
    configuration=_neox_configuration,
    ignored=re.compile(r"layers\.\d+\.attention\.(?:bias|masked_bias|rotary_emb\.inv_freq)"),
)


# BLOOM has ALiBi and a norm after the embedding. It stores query, key and value in one matrix, head by head.


BLOOM = Family(
    name="BLOOM",
    types=("bloom",),
    architecture="BloomForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    fixed={"apply_residual_connection_post_layernorm": False},
    tokens="word_embeddings.weight",
    norms={"word_embeddings_layernorm": "embed.norm", "ln_f": "head.norm"},
    keys={
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("hidden_size", "n_embed"),
        "heads": ("n_head", "num_attention_heads"),
    },
    norm_eps=("layer_norm_epsilon", 1e-5),
    sizes=lambda config: {
        "seq": config.get("seq_length") or DEFAULT_CONTEXT_TOKENS,
        "positions": "alibi",
        "embedding_norm": True,
    },
    layer=partial(family.fused_layer, stem="h", attention="self_attention", norms=NORMS),
    configuration=lambda model: {"seq_length": model.seq},
)


# Falcon has parallel attention and MLP, and shared key heads. Falcon 7B has one norm per layer, later models have two.


def _falcon_sizes(config: Config) -> dict[str, Any]:
    heads = family.first_value(config, "num_attention_heads", "n_head")
    is_later = bool(config.get("new_decoder_architecture"))
    has_one_key_head = not is_later and config.get("multi_query", True)
    keys = 1 if has_one_key_head else config.get("num_kv_heads") or heads
    has_two_norms = is_later and config.get("num_ln_in_parallel_attn") in (None, 2)
    return {
        "kv_heads": keys if keys != heads else 0,
        "ffn": config.get("ffn_hidden_size") or 0,
        "seq": config.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS,
        "blocks": "parallel" if has_two_norms else "parallel-one-norm",
        "biases": "all" if config.get("bias") else "none",
        **family.rotary_sizes(config),
    }


def _falcon_layer(model: Model, i: int) -> Iterator[Counterpart]:
    norms = ("ln_attn", "ln_mlp") if model.blocks == "parallel" else ("input_layernorm",)
    yield from family.fused_layer(model, i, stem="h", attention="self_attention", norms=norms)


def _falcon_configuration(model: Model) -> dict[str, Any]:
    is_later = model.blocks == "parallel" or model.key_heads not in (1, model.heads)
    return {
        "num_kv_heads": model.key_heads,
        "multi_query": model.key_heads == 1,
        "new_decoder_architecture": is_later,
        "num_ln_in_parallel_attn": (2 if model.blocks == "parallel" else 1) if is_later else None,
        "ffn_hidden_size": model.ffn_width,
        "max_position_embeddings": model.seq,
        "bias": model.biases == "all",
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }


FALCON = Family(
    name="Falcon",
    types=("falcon", "RefinedWebModel", "RefinedWeb"),
    architecture="FalconForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    fixed={"parallel_attn": True, "alibi": False},
    tokens="word_embeddings.weight",
    norms={"ln_f": "head.norm"},
    keys={
        "layers": ("num_hidden_layers", "n_layer"),
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads", "n_head"),
    },
    norm_eps=("layer_norm_epsilon", 1e-5),
    gelu=("activation", "gelu"),
    sizes=_falcon_sizes,
    layer=_falcon_layer,
    configuration=_falcon_configuration,
)

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, QWEN2, NEOX, BLOOM, FALCON)
"""All supported model families; an export takes the first family that can represent the model."""
