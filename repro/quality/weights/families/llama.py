"""Llama and Mistral, and Qwen2, whose query, key and value have biases: all projections are matrices of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from repro.config import ConfigError, Model
from repro.quality.weights.families.family import Config, Family, linear, norm, rotary, whole
from repro.quality.weights.rows import Counterpart, Stretch, same
from repro.quality.weights.source import TOKENS


def _sizes(config: Config) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width, keys = config.get("head_dim") or 0, config.get("num_key_value_heads") or heads
    qwen2 = config["model_type"] == "qwen2"
    seq = config["max_position_embeddings"]
    if qwen2 and config.get("use_sliding_window"):
        right = "false: attention that reaches back a window alone is not in our GPT"
        raise ConfigError("use_sliding_window", True, right)
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        seq = min(seq, config["sliding_window"])  # so far it is ordinary attention
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys if keys != heads else 0,
        "head_dim": width if width * heads != hidden else 0,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "seq": seq,
        "norm": "rms",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "biases": "qkv" if qwen2 else "none",
        "tied": bool(config.get("tie_word_embeddings", False)),
        **rotary(config),
    }


def _layer(model: Model, i: int) -> Iterator[Counterpart]:
    theirs, attention, mlp = f"layers.{i}", f"blocks.{i}.attention", f"blocks.{i}.mlp"
    h, f, biased = model.hidden, model.ffn_width, model.biases == "qkv"
    inner = model.heads * model.head_width
    yield from norm(f"{theirs}.input_layernorm", f"{attention}.norm", model)
    for k, name in enumerate("qkv"):
        rows = _projection(attention, model, k)
        yield from linear(f"{theirs}.self_attn.{name}_proj", h, rows, biased=biased)
    yield same(f"{theirs}.self_attn.o_proj.weight", f"{attention}.out", h, inner)
    yield from norm(f"{theirs}.post_attention_layernorm", f"{mlp}.norm", model)
    for name, at in (("gate", 0), ("up", f)):
        yield from linear(f"{theirs}.mlp.{name}_proj", h, whole(f"{mlp}.up", f, at), biased=False)
    yield same(f"{theirs}.mlp.down_proj.weight", f"{mlp}.down", h, f)


def _projection(block: str, model: Model, k: int) -> Callable[[str], tuple[Stretch, ...]]:
    """The rows of query, key or value (k = 0, 1, 2)."""
    width, inner = model.head_width, model.heads * model.head_width
    if model.key_heads == model.heads:
        return whole(f"{block}.qkv", inner, k * inner)
    if k == 0:
        return whole(f"{block}.q", inner)
    first = range((k - 1) * width, 2 * model.key_heads * width, 2 * width)  # each head's key, then its value
    return lambda ending: tuple(Stretch(f"{block}.kv{ending}", row, width) for row in first)


def _ends(model: Model) -> Iterator[Counterpart]:
    yield same("embed_tokens.weight", TOKENS, model.vocab, model.hidden)
    yield from norm("norm", "head.norm", model)


def _configuration(model: Model) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.seq,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }


FAMILY = Family(
    name="Llama",
    types=("llama", "mistral"),
    architecture="LlamaForCausalLM",
    prefix="model.",
    head="lm_head.weight",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    sizes=_sizes,
    layer=_layer,
    ends=_ends,
    configuration=_configuration,
    passed_over=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
QWEN2 = replace(
    FAMILY,
    name="Qwen2",
    types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    fixed={"hidden_act": "silu"},
)
