"""Causal attention: torch's own kernels on every device, and their shapes without the work on `meta`.

Under context parallelism a rank's queries may be the last of a sequence. The mask is then aligned at the lower right
corner of the scores, as in FlashAttention from version 2.1 on.

torch's scaled_dot_product_attention selects a fused kernel by device. On `meta` it would select the path that writes
the s x s scores, which no real device uses. There the module calls a fused operator by name: FlashAttention's, or with
a bias that of xFormers, which supports a bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the definition in the dtype of the arguments."""
    s, d, keys = *q.shape[-2:], k.shape[-2]
    future = ~_visible(s, keys, q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) / d**0.5
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return [queries, keys], True where one of the last `queries` positions attends to a key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v under the causal mask; q and the result are [b, a, s, d].

    k and v have n >= s rows, of which the last s belong to the queries. They have a heads or a divisor of a;
    consecutive query heads share a head. `bias` [1, a, s, n] has -inf at future keys, and needs no gradient. Backward
    saves q, k, v, bias, the result and one fp32 number per row, but not the scores.
    """
    shared = k.shape[1] != q.shape[1]
    if bias is not None:
        if shared:  # operators with a bias do not support shared heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if q.device.type == "meta":
            whole = bias.expand(q.shape[0], -1, -1, -1)
            biased: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, whole, True)[0]
            return biased
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if q.device.type == "meta":
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return output
    if k.shape[2] == q.shape[2]:
        how: dict[str, Any] = {"is_causal": True}
    elif q.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler in two seconds

        how = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
    else:
        how = {"attn_mask": _visible(q.shape[2], k.shape[2], q.device)}
    if shared and q.device.type == "cpu" and k.shape[2] != q.shape[2]:
        # Queries of a key head become rows of one query head, because `enable_gqa` would copy the keys.
        rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        mask = how["attn_mask"].repeat(rows.shape[2] // q.shape[2], 1)
        return torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask).view(q.shape)
    if shared:
        how["enable_gqa"] = True
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
