"""Which heads torch's fused attention takes."""

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
