"""GPT-NeoX and Pythia: query, key and value are one matrix, head by head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from repro.config import Model
from repro.quality.weights.families.family import TO_GELUS, Config, Family, gelu, norm, projections, rotary
from repro.quality.weights.rows import Counterpart, same
from repro.quality.weights.source import TOKENS


def _sizes(config: Config) -> dict[str, Any]:
    told = config.get("rope_parameters") or {}
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "seq": config["max_position_embeddings"],
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "mlp": gelu(config, "hidden_act", "gelu"),
        "blocks": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "rotary_fraction": float(told.get("partial_rotary_factor") or config.get("rotary_pct", 0.25)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        **rotary(config),
    }


def _layer(model: Model, i: int) -> Iterator[Counterpart]:
    theirs, attention, mlp = f"layers.{i}", f"blocks.{i}.attention", f"blocks.{i}.mlp"
    yield from norm(f"{theirs}.input_layernorm", f"{attention}.norm", model)
    yield from norm(f"{theirs}.post_attention_layernorm", f"{mlp}.norm", model)
    yield from projections(theirs, i, model, "attention", biased=True)


def _ends(model: Model) -> Iterator[Counterpart]:
    yield same("embed_in.weight", TOKENS, model.vocab, model.hidden)
    yield from norm("final_layer_norm", "head.norm", model)


def _configuration(model: Model) -> dict[str, Any]:
    turned = {"rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_fraction}
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.seq,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": TO_GELUS.get(model.mlp),
        "use_parallel_residual": model.blocks == "parallel",
        "rotary_pct": model.rotary_fraction,
        "rotary_emb_base": model.rotary_base,
        "rope_parameters": {"rope_type": "default", **turned},
    }


FAMILY = Family(
    name="GPT-NeoX",
    types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    fixed={"attention_bias": True},
    sizes=_sizes,
    layer=_layer,
    ends=_ends,
    configuration=_configuration,
    passed_over=re.compile(r"layers\.\d+\.attention\.(?:bias|masked_bias|rotary_emb\.inv_freq)"),
)
