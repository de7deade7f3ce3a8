"""BLOOM: ALiBi, a norm after the embedding; query, key and value are one matrix, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from repro.config import Model
from repro.quality.weights.families.family import Config, Family, first_of, norm, projections
from repro.quality.weights.rows import Counterpart, same
from repro.quality.weights.source import TOKENS

SEQ = 2048
"""Tokens of a sample where a configuration does not say, as most do not: ALiBi has no longest one."""


def _sizes(config: Config) -> dict[str, Any]:
    return {
        "layers": first_of(config, "n_layer", "num_hidden_layers"),
        "hidden": first_of(config, "hidden_size", "n_embed"),
        "heads": first_of(config, "n_head", "num_attention_heads"),
        "vocab": config["vocab_size"],
        "seq": config.get("seq_length") or SEQ,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "positions": "alibi",
        "embedding_norm": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
    }


def _layer(model: Model, i: int) -> Iterator[Counterpart]:
    theirs, attention, mlp = f"h.{i}", f"blocks.{i}.attention", f"blocks.{i}.mlp"
    yield from norm(f"{theirs}.input_layernorm", f"{attention}.norm", model)
    yield from norm(f"{theirs}.post_attention_layernorm", f"{mlp}.norm", model)
    yield from projections(theirs, i, model, "self_attention", biased=True)


def _ends(model: Model) -> Iterator[Counterpart]:
    yield same("word_embeddings.weight", TOKENS, model.vocab, model.hidden)
    yield from norm("word_embeddings_layernorm", "embed.norm", model)
    yield from norm("ln_f", "head.norm", model)


def _configuration(model: Model) -> dict[str, Any]:
    return {
        "n_layer": model.layers,
        "hidden_size": model.hidden,
        "n_head": model.heads,
        "seq_length": model.seq,
        "layer_norm_epsilon": model.norm_eps,
    }


FAMILY = Family(
    name="BLOOM",
    types=("bloom",),
    architecture="BloomForCausalLM",
    prefix="transformer.",
    head="lm_head.weight",
    fixed={"apply_residual_connection_post_layernorm": False},
    sizes=_sizes,
    layer=_layer,
    ends=_ends,
    configuration=_configuration,
)
