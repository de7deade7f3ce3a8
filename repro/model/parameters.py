"""Exact parameter counts, by part, from the sizes alone.

With l layers, width h, MLP width f, head width times heads a, vocabulary V and longest sequence s:

    gpt   (V + s) h + l (4 a h + 3 a + h  +  2 f h + f + h  +  4 h) + 2 h

which for a = h and f = 4h is 12 l h^2 (1 + 13/(12 h)) + (V + s) h + 2 h: Megatron's eq. 2
(2104.04473 sec. 5) and the final LayerNorm, which that equation leaves out.  Of other layers the same parts count
what is there: 2 (a + k) h with keys and values of width k, 3 f h of SwiGLU, norms and biases as they are.
"""

from __future__ import annotations

from repro.config.model import Model

TOKEN_TYPES = 2
"""BERT's segments A and B."""
RELATIVE_BUCKETS = 32
"""Buckets of T5's relative position bias, one scalar per bucket and head."""


def count(model: Model) -> dict[str, int]:
    """Parameters by part; the parts depend on the architecture and sum to `total`.

    `gpt`: biases on all linear layers, LayerNorms with weight and bias, output tied to the embedding, unless the model
    says otherwise.
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
    found = {
        "token_embedding": model.vocab * h,
        "position_embedding": model.seq * h if model.positions == "learned" else 0,
        "attention": model.layers * _attention(model),
        "mlp": model.layers * _mlp(model),
        "norms": model.layers * layer_norms(model) + (1 + model.embedding_norm) * norm(model),
        "output": 0 if model.tied else model.vocab * h,
    }
    return {part: size for part, size in found.items() if size}


def norm(model: Model) -> int:
    """Of one norm: weight and bias, or the weight alone."""
    return model.hidden if model.norm == "rms" else 2 * model.hidden


def layer_norms(model: Model) -> int:
    """Of a layer's norms."""
    return norm(model) if model.blocks == "parallel-one-norm" else 2 * norm(model)


def row_biases(model: Model) -> int:
    """Biases of a layer's two matrices whose outputs are summed over tp."""
    return 2 * model.hidden if model.biases == "all" else 0


def keys_and_values(model: Model) -> int:
    """Of a layer: matrices and biases."""
    return (model.hidden + (model.biases != "none")) * 2 * model.key_heads * model.head_width


def _attention(model: Model) -> int:
    """Query, key, value and output matrices with their biases."""
    inner, h = model.heads * model.head_width, model.hidden
    return (
        (h + (model.biases != "none")) * inner + keys_and_values(model) + inner * h + row_biases(model) // 2
    )


def _mlp(model: Model) -> int:
    """Two or three matrices with their biases."""
    biases = (model.mlp_matrices - 1) * model.ffn_width if model.biases == "all" else 0
    return model.mlp_matrices * model.hidden * model.ffn_width + biases + row_biases(model) // 2


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
