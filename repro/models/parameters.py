"""Exact parameter counts, by part, from the sizes alone.

With l layers, width h, MLP width f, head width times heads a, vocabulary V and longest sequence s:

    gpt   (V + s) h + l (4 a h + 3 a + h  +  2 f h + f + h  +  4 h) + 2 h

which for a = h and f = 4h is 12 l h^2 (1 + 13/(12 h)) + (V + s) h + 2 h: Megatron's eq. 2
(2104.04473 sec. 5) and the final LayerNorm, which that equation leaves out.
"""

from __future__ import annotations

from repro.config.model import Model

TOKEN_TYPES = 2
"""BERT's segments A and B."""
RELATIVE_BUCKETS = 32
"""Buckets of T5's relative position bias, one scalar per bucket and head."""


def count(model: Model) -> dict[str, int]:
    """Parameters by part; the parts depend on the architecture and sum to `total`.

    `gpt`: biases on all linear layers, LayerNorms with weight and bias, output tied to the embedding.
    `bert`: the pre-training model of 1810.04805, with pooler and both heads (masked words, next sentence);
    the word head's matrix is tied to the embedding.
    `t5`: version 1.0 of 1910.10683: no biases, RMS norms, one relative position bias a stack, tied output.
    """
    return {"gpt": _gpt, "bert": _bert, "t5": _t5}[model.architecture](model)


def total(model: Model) -> int:
    """All parameters, each counted once."""
    return sum(count(model).values())


def _gpt(model: Model) -> dict[str, int]:
    h = model.hidden
    return {
        "token_embedding": model.vocab * h,
        "position_embedding": model.seq * h,
        "attention": model.layers * _attention(model),
        "mlp": model.layers * _mlp(model),
        "norms": (2 * model.layers + 1) * 2 * h,
    }


def _attention(model: Model) -> int:
    """Query, key, value and output matrices with biases."""
    inner = model.heads * model.head_width
    return 3 * (model.hidden + 1) * inner + (inner + 1) * model.hidden


def _mlp(model: Model) -> int:
    """Two matrices with biases."""
    return (model.hidden + 1) * model.ffn_width + (model.ffn_width + 1) * model.hidden


def _bert(model: Model) -> dict[str, int]:
    h = model.hidden
    return {
        "token_embedding": model.vocab * h,
        "position_embedding": model.seq * h,
        "token_types": TOKEN_TYPES * h,
        "attention": model.layers * _attention(model),
        "mlp": model.layers * _mlp(model),
        "norms": (2 * model.layers + 1) * 2 * h,
        "pooler": h * h + h,
        "word_head": h * h + h + 2 * h + model.vocab,
        "sentence_head": 2 * h + 2,
    }


def _t5(model: Model) -> dict[str, int]:
    h, encoder, decoder = model.hidden, model.layers, model.decoder_layers
    attention = 4 * h * model.heads * model.head_width
    return {
        "token_embedding": model.vocab * h,
        "position_bias": 2 * RELATIVE_BUCKETS * model.heads,
        "attention": (encoder + 2 * decoder) * attention,
        "mlp": (encoder + decoder) * 2 * h * model.ffn_width,
        "norms": (2 * encoder + 1 + 3 * decoder + 1) * h,
    }
