"""Exact counts from the sizes of a model: parameters, bytes of model states, and floating-point operations.

With l layers, width h, MLP width f, heads times head width a, vocabulary V and longest sequence s, GPT-2 has

    (V + s) h + l (4 a h + 3 a + h  +  2 f h + f + h  +  4 h) + 2 h

parameters: Megatron's eq. 2 (2104.04473 sec. 5) and the final LayerNorm, which that equation omits.  FLOP are those of
matrix products, 2 m k n for m x k times k x n (2104.04473, appendix).  Per layer, the forward pass of B samples has

    queries, keys, values, output    8 B s h a      (4 B s h (a + k) with keys and values of width k)
    scores and their use             4 B s^2 a      (including the masked causal half)
    MLP                              4 B s h f      (6 B s h f with SwiGLU)

and the logits have 2 B s h V.  A backward pass has twice the FLOP of its forward pass.  Recomputation repeats the
forward pass of the layers (eq. 3); selective recomputation repeats the scores and their use.
"""

from __future__ import annotations

from repro.config.errors import require
from repro.config.layout import SELECTIVE
from repro.config.model import Model
from repro.config.system import System

TOKEN_TYPES = 2
"""Number of BERT's token types, segments A and B."""
RELATIVE_BUCKETS = 32
"""Number of buckets of T5's relative position bias, with one parameter per bucket and head."""
K = 12
"""Optimizer bytes per parameter: fp32 master weight, momentum and variance (1910.02054 sec. 3.1)."""
GPT2_FLOPS_FORMULA = (
    "2104.04473 eq. 3: 72 B s l h^2 (1 + s/6h + V/12lh); recomputing layers 96 B s l h^2 (1 + s/6h + V/16lh)"
)
"""Formula, as text in records, of the FLOP of a training step with GPT-2's layers, without and with recomputation."""
GENERAL_FLOPS_FORMULA = (
    "matrix by matrix as in 2104.04473: 3 l (4 B s h (a + k) + 4 B s^2 a + 2 m B s h f) + 6 B s h V "
    "with keys of width k and m matrices per MLP; 4 l in place of 3 l if layers are recomputed"
)
"""Formula, as text in records, of the FLOP of a training step with grouped-query attention or SwiGLU."""


def parameters_by_part(model: Model) -> dict[str, int]:
    """Return the number of parameters of each part of the model, whose sum is `total_parameters`.

    `gpt`: the model that engines train.  `bert`: the pre-training model of 1810.04805, with pooler and both heads
    (masked words, next sentence); the word head's matrix is tied to the embedding.  `t5`: version 1.0 of 1910.10683,
    without biases, with RMS norms, a relative position bias in encoder and in decoder, and a tied output.
    """
    return {"gpt": _gpt, "bert": _bert, "t5": _t5}[model.architecture](model)


def total_parameters(model: Model) -> int:
    """Return the number of parameters of a model; parameters that two modules share count once."""
    return sum(parameters_by_part(model).values())


def _gpt(model: Model) -> dict[str, int]:
    h = model.hidden
    found = {
        "token_embedding": model.vocab * h,
        "position_embedding": model.seq * h if model.positions == "learned" else 0,
        "attention": model.layers * _attention(model),
        "mlp": model.layers * _mlp(model),
        "norms": model.layers * count_layer_norms(model) + (1 + model.embedding_norm) * count_norm(model),
        "output": 0 if model.tied else model.vocab * h,
    }
    return {part: size for part, size in found.items() if size}


def count_norm(model: Model) -> int:
    """Return the number of parameters of one normalisation layer: weight and bias, or only the weight for RMS norm."""
    return model.hidden if model.norm == "rms" else 2 * model.hidden


def count_layer_norms(model: Model) -> int:
    """Return the number of parameters of the one or two norms in a transformer layer."""
    return count_norm(model) if model.blocks == "parallel-one-norm" else 2 * count_norm(model)


def count_row_biases(model: Model) -> int:
    """Return the number of biases of a layer's row-parallel matrices: attention output and second MLP matrix."""
    return 2 * model.hidden if model.biases == "all" else 0


def count_keys_and_values(model: Model) -> int:
    """Return the number of parameters of the key and value projections in a transformer layer, including biases."""
    return (model.hidden + (model.biases != "none")) * 2 * model.key_heads * model.head_width


def _attention(model: Model) -> int:
    """Return the number of parameters of a layer's query, key, value and output projections, including biases."""
    inner, h = model.heads * model.head_width, model.hidden
    return (
        (h + (model.biases != "none")) * inner
        + count_keys_and_values(model)
        + inner * h
        + count_row_biases(model) // 2
    )


def _mlp(model: Model) -> int:
    """Return the number of parameters of an MLP's two or three matrices and their biases."""
    biases = (model.mlp_matrices - 1) * model.ffn_width if model.biases == "all" else 0
    return model.mlp_matrices * model.hidden * model.ffn_width + biases + count_row_biases(model) // 2


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


def states_bytes(psi: int, nd: int, stage: int, k: int = K) -> float:
    """Return the bytes per device of `psi` fp16 parameters, their fp16 gradients and Adam's states (1910.02054 sec. 5).

    ZeRO stage 0: (4 + K) Psi;  1, P_os: 4 Psi + K Psi / Nd;  2, P_os+g: 2 Psi + (2 + K) Psi / Nd;
    3, P_os+g+p: (4 + K) Psi / Nd.  `nd`: number of devices Nd.  Shards are not padded here, as in the paper.
    """
    assert nd >= 1
    replicated = {0: 4 + k, 1: 4, 2: 2, 3: 0}[stage]
    return psi * (replicated + (4 + k - replicated) / nd)


def flops_formula(model: Model) -> str:
    """Return the formula for the FLOP of a training step of `model`, as text for records."""
    return GENERAL_FLOPS_FORMULA if model.kv_heads or model.mlp_matrices != 2 else GPT2_FLOPS_FORMULA


def layers_forward(model: Model, seq: int, samples: int) -> int:
    """Return the FLOP of all transformer layers in the forward pass over `samples` samples of `seq` tokens.

    Raises `ConfigError` for an architecture other than gpt.
    """
    require(
        model.architecture == "gpt", "model", model.name, "a model of architecture gpt, to count its FLOP"
    )
    inner = model.heads * model.head_width
    keys = model.key_heads * model.head_width
    mlp = 2 * model.mlp_matrices * model.hidden * model.ffn_width
    per_token = 4 * model.hidden * (inner + keys) + _scores_per_token(model, seq) + mlp
    return model.layers * samples * seq * per_token


def logits_forward(model: Model, seq: int, samples: int) -> int:
    """Return the FLOP of the logits in the forward pass over `samples` samples of `seq` tokens."""
    return 2 * samples * seq * model.hidden * model.vocab


def model_flops(model: Model, seq: int, samples: int) -> int:
    """Return the FLOP of forward and backward pass over `samples` samples of `seq` tokens, without recomputation."""
    return 3 * (layers_forward(model, seq, samples) + logits_forward(model, seq, samples))


def causal_flops(model: Model, seq: int, samples: int) -> float:
    """Return the FLOP of forward and backward pass with half of the attention scores, because attention is causal.

    Megatron-LM of 2025 and MaxText count half of the scores; 2104.04473 counts all scores.
    """
    square = 3 * model.layers * samples * seq * _scores_per_token(model, seq)
    return model_flops(model, seq, samples) - square / 2


def hardware_flops(model: Model, seq: int, samples: int, recompute: bool | str) -> int:
    """Return the FLOP that devices execute in a step, including the layers or scores that `recompute` repeats."""
    repeated = layers_forward(model, seq, samples) if recompute else 0
    if recompute == SELECTIVE:
        repeated = model.layers * samples * seq * _scores_per_token(model, seq)
    return model_flops(model, seq, samples) + repeated


def _scores_per_token(model: Model, seq: int) -> int:
    """Return the forward FLOP per token of a layer's attention scores and of their product with the values."""
    return 4 * seq * model.heads * model.head_width


def utilisation(model_flops_per_s: float, devices: int, system: System, precision: str) -> float | None:
    """Return the MFU: model FLOP/s without recomputation over the peak FLOP/s of all devices (2204.02311 sec. 4.1).

    Return None if the device's peak at `precision` is unknown.
    """
    peak = system.device.peak_flops.get(precision)
    return None if peak is None or not peak.value else model_flops_per_s / devices / peak.value
