"""Which heads torch's fused attention takes, and Megatron-LM's fused softmax."""

from __future__ import annotations

from repro.config.layout import Layout
from repro.config.model import Model

OF_HEADS = 8
"""Elements of 16 bits that a head must be a multiple of before compute capability 8.0, where xFormers' kernel is all
there is; FlashAttention pads (`sdp_utils.cpp` of PyTorch, `minimum_gemm_alignment`)."""


def unfused(model: Model, layout: Layout, capability: str) -> str:
    """One line where torch's attention falls back to products that write the scores; empty where it does not.

    capability: of the device, `7.0`; empty where there is none.
    """
    other = layout.kernels.writes_scores or layout.precision == "fp32" or model.head_width % OF_HEADS == 0
    if other or not capability or float(capability) >= 8:
        return ""
    return (
        f"Heads of {model.head_width} elements are no multiple of {OF_HEADS}, for which torch has no fused attention "
        f"on compute capability {capability}: it writes the scores, which neither memory nor time here has."
    )


def has_fused_softmax(samples: int, heads: int, s: int) -> bool:
    """Whether Megatron-LM's one operator for scale, mask and softmax takes so many samples of so many heads of a rank,
    with s tokens each: four squares of scores share a thread block (`megatron/model/fused_softmax.py` at 44bfcb32)."""
    return samples * heads % 4 == 0 and s % 4 == 0 and s <= 2048
