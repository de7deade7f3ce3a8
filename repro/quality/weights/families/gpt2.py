"""GPT-2.  Its matrices are `Conv1D`s, stored as [in, out]; query, key and value are one of them, side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from repro.config import Model
from repro.quality.weights.families.family import TO_GELUS, Config, Family, gelu, norm
from repro.quality.weights.rows import Counterpart, same
from repro.quality.weights.source import TOKENS


def _sizes(config: Config) -> dict[str, Any]:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "vocab": config["vocab_size"],
        "seq": config.get("n_positions") or config["n_ctx"],
        "ffn": config.get("n_inner") or 0,
        "mlp": gelu(config, "activation_function", "gelu_new"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _layer(model: Model, i: int) -> Iterator[Counterpart]:
    h, f, inner = model.hidden, model.ffn_width, model.heads * model.head_width
    for part, name, linears in (
        ("attention", "ln_1", (("qkv", "attn.c_attn", h, 3 * inner), ("out", "attn.c_proj", inner, h))),
        ("mlp", "ln_2", (("up", "mlp.c_fc", h, f), ("down", "mlp.c_proj", f, h))),
    ):
        ours, theirs = f"blocks.{i}.{part}", f"h.{i}"
        yield from norm(f"{theirs}.{name}", f"{ours}.norm", model)
        for matrix, conv, inputs, outputs in linears:
            yield same(f"{theirs}.{conv}.weight", f"{ours}.{matrix}", inputs, outputs, transposed=True)
            yield same(f"{theirs}.{conv}.bias", f"{ours}.{matrix}_bias", outputs)


def _ends(model: Model) -> Iterator[Counterpart]:
    yield same("wte.weight", TOKENS, model.vocab, model.hidden)
    yield same("wpe.weight", "embed.positions", model.seq, model.hidden)
    yield from norm("ln_f", "head.norm", model)


def _configuration(model: Model) -> dict[str, Any]:
    return {
        "activation_function": TO_GELUS.get(model.mlp),
        "layer_norm_epsilon": model.norm_eps,
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_positions": model.seq,
        "n_ctx": model.seq,
        "n_inner": model.ffn_width,
    }


FAMILY = Family(
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
    sizes=_sizes,
    layer=_layer,
    ends=_ends,
    configuration=_configuration,
    passed_over=re.compile(r"h\.\d+\.attn\.(?:masked_)?bias"),
)
