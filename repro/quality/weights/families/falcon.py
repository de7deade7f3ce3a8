"""Falcon: attention and MLP side by side, keys and values shared; of 7B on one norm, from 40B on with one each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from repro.config import Model
from repro.quality.weights.families.family import (
    TO_GELUS,
    Config,
    Family,
    first_of,
    gelu,
    norm,
    projections,
    rotary,
)
from repro.quality.weights.rows import Counterpart, same
from repro.quality.weights.source import TOKENS

SEQ = 2048
"""Tokens of a sample where a configuration does not say."""


def _sizes(config: Config) -> dict[str, Any]:
    heads, hidden = first_of(config, "num_attention_heads", "n_head"), config["hidden_size"]
    later = bool(config.get("new_decoder_architecture"))
    alone = not later and config.get("multi_query", True)
    keys = 1 if alone else config.get("num_kv_heads") or heads
    two = later and config.get("num_ln_in_parallel_attn") in (None, 2)
    return {
        "layers": first_of(config, "num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys if keys != heads else 0,
        "ffn": config.get("ffn_hidden_size") or 0,
        "vocab": config["vocab_size"],
        "seq": config.get("max_position_embeddings") or SEQ,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "mlp": gelu(config, "activation", "gelu"),
        "blocks": "parallel" if two else "parallel-one-norm",
        "biases": "all" if config.get("bias") else "none",
        "tied": bool(config.get("tie_word_embeddings", True)),
        **rotary(config),
    }


def _layer(model: Model, i: int) -> Iterator[Counterpart]:
    theirs, attention, mlp = f"h.{i}", f"blocks.{i}.attention", f"blocks.{i}.mlp"
    if model.blocks == "parallel":
        yield from norm(f"{theirs}.ln_attn", f"{attention}.norm", model)
        yield from norm(f"{theirs}.ln_mlp", f"{mlp}.norm", model)
    else:
        yield from norm(f"{theirs}.input_layernorm", f"{attention}.norm", model)
    yield from projections(theirs, i, model, "self_attention", biased=model.biases == "all")


def _ends(model: Model) -> Iterator[Counterpart]:
    yield same("word_embeddings.weight", TOKENS, model.vocab, model.hidden)
    yield from norm("ln_f", "head.norm", model)


def _configuration(model: Model) -> dict[str, Any]:
    later = model.blocks == "parallel" or model.key_heads not in (1, model.heads)
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_kv_heads": model.key_heads,
        "multi_query": model.key_heads == 1,
        "new_decoder_architecture": later,
        "num_ln_in_parallel_attn": (2 if model.blocks == "parallel" else 1) if later else None,
        "ffn_hidden_size": model.ffn_width,
        "max_position_embeddings": model.seq,
        "layer_norm_epsilon": model.norm_eps,
        "activation": TO_GELUS.get(model.mlp),
        "bias": model.biases == "all",
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }


FAMILY = Family(
    name="Falcon",
    types=("falcon", "RefinedWebModel", "RefinedWeb"),
    architecture="FalconForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    fixed={"parallel_attn": True, "alibi": False},
    sizes=_sizes,
    layer=_layer,
    ends=_ends,
    configuration=_configuration,
)
