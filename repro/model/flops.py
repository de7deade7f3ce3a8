"""Floating-point operations of one training pass, counted matrix by matrix.

A product of m x k and k x n is 2 m k n operations; only matrices count, as in Megatron 2104.04473,
appendix.  With B samples of s tokens, and a the attention's inner width (h in all published models), one
layer's forward pass is

    queries, keys, values, output    8 B s h a
    scores and their use             4 B s^2 a      (the causal half that is masked is counted, as there)
    MLP                              4 B s h f

which for a = h, f = 4h is 24 B s h^2 + 4 B s^2 h, and the logits are 2 B s h V.  A backward pass costs twice
its forward pass.  Model FLOPs are the 3 passes, 72 B s l h^2 (1 + s/6h + V/12lh).  Hardware FLOPs under
recomputation repeat the layers' forward pass, not the logits': that is the paper's eq. 3,
F = 96 B s l h^2 (1 + s/6h + V/16lh).  With keys and values of width k there are 4 B s h (a + k) in place of the first
line, with SwiGLU 6 B s h f in place of the third.
"""

from __future__ import annotations

from repro.config.errors import require
from repro.config.model import Model
from repro.config.system import System

FORMULA = (
    "2104.04473 eq. 3: 72 B s l h^2 (1 + s/6h + V/12lh); recomputing layers 96 B s l h^2 (1 + s/6h + V/16lh)"
)
"""What the two functions compute of GPT-2's layer, for records."""
OTHER_LAYERS = (
    "matrix by matrix as in 2104.04473: 3 l (4 B s h (a + k) + 4 B s^2 a + 2 m B s h f) + 6 B s h V, "
    "keys of width k, m matrices of the MLP; recomputing layers 4 l"
)
"""The same of other layers."""


def formula(model: Model) -> str:
    """What the two functions compute of `model`."""
    return OTHER_LAYERS if model.kv_heads or model.mlp_matrices != 2 else FORMULA


def layers_forward(model: Model, seq: int, samples: int) -> int:
    """FLOP of all layers' forward pass over `samples` of `seq` tokens.

    Raises `ConfigError` for an architecture other than gpt.
    """
    require(model.architecture == "gpt", "model", model.name, "a gpt; other models are only counted")
    inner = model.heads * model.head_width
    keys = model.key_heads * model.head_width
    mlp = 2 * model.mlp_matrices * model.hidden * model.ffn_width
    per_token = 4 * model.hidden * (inner + keys) + 4 * seq * inner + mlp
    return model.layers * samples * seq * per_token


def logits_forward(model: Model, seq: int, samples: int) -> int:
    """FLOP of the forward product with the embedding, or with the matrix that the head has of its own."""
    return 2 * samples * seq * model.hidden * model.vocab


def model_flops(model: Model, seq: int, samples: int) -> int:
    """FLOP of forward and backward over `samples` of `seq` tokens, whatever is recomputed."""
    return 3 * (layers_forward(model, seq, samples) + logits_forward(model, seq, samples))


def hardware_flops(model: Model, seq: int, samples: int, recompute: bool) -> int:
    """FLOP that the devices execute: with `recompute` the layers run forward twice."""
    repeated = layers_forward(model, seq, samples) if recompute else 0
    return model_flops(model, seq, samples) + repeated


def utilisation(model_flops_per_s: float, devices: int, system: System, precision: str) -> float | None:
    """MFU: FLOP/s of the model, without what is recomputed, over the dense peak of `devices` (2204.02311 sec. 4.1).

    None where the device's peak at `precision` is not known.
    """
    peak = system.device.peak_flops.get(precision)
    return None if peak is None or not peak.value else model_flops_per_s / devices / peak.value
