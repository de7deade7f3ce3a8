"""Causal attention: torch's own kernels on every device, and their shapes without the work on `meta`.

torch's scaled_dot_product_attention picks a fused kernel by device. On `meta` it would pick the path that
writes the s x s scores out, which no device takes; so there the fused operator is named: the one of FlashAttention, or
with a bias that of xFormers, which alone reads one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in the dtype of the arguments."""
    s, d = q.shape[-2:]
    future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) / d**0.5
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v under the causal mask; q and the result are [b, a, s, d].

    k and v have a heads or a divisor of them, each shared by as many queries in a row. `bias` [1, a, s, s] has -inf at
    future keys, and needs no gradient. Saved for backward: q, k, v, bias, the result and one fp32 number per row,
    never the scores.
    """
    shared = k.shape[1] != q.shape[1]
    if bias is not None:
        if shared:  # what reads a bias has no shared heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if q.device.type == "meta":
            whole = bias.expand(q.shape[0], -1, -1, -1)
            biased: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, whole, True)[0]
            return biased
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if q.device.type == "meta":
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return output
    if shared:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
