"""Causal attention with torch's scaled_dot_product_attention on real devices, and with a fused operator on `meta`.

On `meta`, scaled_dot_product_attention would select the unfused path that writes all scores. If there are fewer queries
than keys (context parallelism), the queries are the last positions of the sequence, as in FlashAttention from 2.1 on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute causal attention with plain torch operators in the dtype of the arguments."""
    s, d, keys = *q.shape[-2:], k.shape[-2]
    future = ~_visible(s, keys, q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) / d**0.5
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask [queries, keys] of the last `queries` positions, True where a query attends to a key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v under the causal mask; q and the result are [b, a, s, d].

    k and v are [b, g, n, d] with n >= s; the queries are the last s of n positions. g divides a, and a / g consecutive
    query heads share a key head. `bias` [1, a, s, n] must have -inf at future keys, and gets no gradient. Backward
    saves q, k, v, bias, the result and one fp32 number per query, but not the scores.
    """
    shared = k.shape[1] != q.shape[1]
    if bias is not None:
        if shared:  # Attention operators with a bias do not support key heads that query heads share.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if q.device.type == "meta":
            full = bias.expand(q.shape[0], -1, -1, -1)
            biased: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, full, True)[0]
            return biased
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if q.device.type == "meta":
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return output
    if k.shape[2] == q.shape[2]:
        how: dict[str, Any] = {"is_causal": True}
    elif q.device.type == "cuda":
        # Imported here, because this module imports torch's compiler, which takes two seconds.
        from torch.nn.attention.bias import causal_lower_right

        how = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
    else:
        how = {"attn_mask": _visible(q.shape[2], k.shape[2], q.device)}
    if shared and q.device.type == "cpu" and k.shape[2] != q.shape[2]:
        # All queries of a key head become rows of one query head, because `enable_gqa` would copy the keys.
        rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        mask = how["attn_mask"].repeat(rows.shape[2] // q.shape[2], 1)
        return torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask).view(q.shape)
    if shared:
        how["enable_gqa"] = True
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
