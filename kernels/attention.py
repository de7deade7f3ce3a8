"""Causal attention: torch's own kernels on every device, and their shapes without the work on `meta`.

torch's scaled_dot_product_attention picks a fused kernel by device. On `meta` it would pick the path that
writes the s x s scores out, which no device takes; so there the fused operator is named.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, in the dtype of the arguments."""
    s, d = q.shape[-2:]
    future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)) / d**0.5
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v under the causal mask; q, k, v and the result are [b, a, s, d].

    Saved for backward: q, k, v, the result and one fp32 number per row, never the scores.
    """
    if q.device.type == "meta":
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return output
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
