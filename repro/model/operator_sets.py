"""Attention and other operations of a transformer layer, with the operators that software of several years used.

`fused`    fused attention, which does not write the scores [b, a/t, s, s]; the rest as in `softmax`.  With dropout of
           attention weights it equals `softmax`, because fused attention would drop other weights under another layout
`softmax`  Megatron-LM from December 2020 on (43529f78; 2104.04473 sec. 4.2): batched products write and read the
           scores.  Scale, mask and softmax are one operator if four divides the samples times heads of a rank, else
           five in fp32.  Bias and GELU are one operator.  Bias, dropout and residual are one operator
`unfused`  Megatron-LM of September 2019 (a0368ddf, `mpu/transformer.py`), on which DeepSpeed of February 2020 ran:
           every line of code is one operator, except GELU, which was compiled into one

Variants of `fused`: `reference` has no CUDA kernels of `kernels/`, `megatron-2025` copies shared values for Transformer
Engine's attention, and `torchtitan-2024` computes the loss from an fp32 copy of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from repro import kernels
from repro.config import OperatorSet
from repro.config.engines import has_fused_softmax

MASK_PENALTY = 10000.0
"""Amount by which a causal mask lowers the attention score of a masked key, one after the query."""


def causal_mask(s: int, like: Tensor) -> Tensor:
    """Return the causal mask [1, 1, s, s] in the dtype of `like`: 1 if key j is not after query i, else 0."""
    return torch.ones(1, 1, s, s, dtype=like.dtype, device=like.device).tril_()


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes of all attention heads (2108.12409 sec. 3): for the largest power of two n <= heads, n
    powers of 2^(-8/n), then every other slope of 2n heads."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    n = 2 ** int(math.log2(heads))
    return [*powers(n), *powers(2 * n)[::2]][:heads]


def alibi_bias(heads: int, own: range, queries: range, like: Tensor) -> Tensor:
    """Return ALiBi's bias for the scores of the heads with indices `own`: slope * (key - query), -inf for future keys.

    The shape is [1, len(own), len(queries), k] for the k keys up to the last query, in the dtype of `like`.
    """
    at = torch.arange(queries.stop, device=like.device)
    distance = (at[None, :] - at[queries.start :, None]).to(torch.float32)
    distance.masked_fill_(distance > 0, float("-inf"))
    bias = torch.empty(1, len(own), *distance.shape, dtype=like.dtype, device=like.device)
    for i, slope in enumerate(alibi_slopes(heads)[own.start : own.stop]):
        bias[0, i].copy_(distance * slope)
    return bias


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights [b, a/t, s, s], which drops equal elements under every layout and operator set."""

    p: float
    key: int
    first_sample: int
    """Index of the micro-batch's first sample in the global batch."""
    heads: int
    """Number of attention heads of the model."""
    first_head: int
    """Index of the first head of this tp rank."""
    device_key: Tensor | None = None
    """Key of the dropout generator and index of the first sample, int64 [2] in device memory, for CUDA graphs. With
    None, both are kernel arguments."""

    def __call__(self, weights: Tensor, plain: bool = False) -> Tensor:
        """Return attention weights after dropout, by one CUDA kernel or, if `plain`, by torch's operators."""
        b, a, s, _ = weights.shape
        # A row of attention weights selects its random numbers by its index: s rows per head, head after head of a
        # sample.
        rows, first = self.heads * s, self.first_head * s
        flat = weights.view(b, a * s, s)
        place = (self.first_sample, rows, first, True)
        dropped = kernels.bias_dropout_residual(
            flat, None, None, self.p, self.key, *place, device_key=self.device_key, plain=plain
        )
        return dropped.view(b, a, s, s)

    def keep(self, weights: Tensor, s: int) -> Tensor:
        """Return which attention weights [b, a/t, c, k] dropout retains, for queries k - c to k - 1 of s tokens."""
        b, a, c, k = weights.shape
        samples = self.first_sample + torch.arange(b, device=weights.device)
        heads = self.first_head + torch.arange(a, device=weights.device)
        row = (samples[:, None] * self.heads + heads)[:, :, None] * s
        rows = (row + torch.arange(k - c, k, device=weights.device)).flatten()
        return kernels.keep_mask(rows, k, self.p, self.key).view(weights.shape)


def attend(
    operators: OperatorSet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: WeightDropout | None,
    mask: Tensor | None,
    cp: int = 1,
) -> Tensor:
    """Return causal attention softmax(q k^T / sqrt(d)) v of q [b, a/t, s, d]; k and v may have fewer heads than q.

    With `cp` > 1, q has one of the 2 cp chunks of a sample's tokens, and k and v have all tokens up to the chunk's end.
    `mask`: result of `causal_mask` for `unfused`, otherwise of `alibi_bias`, or None.
    """
    if not operators.writes_scores and dropout is None:
        return kernels.causal_attention(q, k, v, mask)
    if cp > 1:
        assert dropout is not None
        return _explicit(q, k, v, dropout, mask, q.shape[2] * 2 * cp)
    if operators is not OperatorSet.UNFUSED:
        return _softmax(q, k, v, dropout, mask, operators)
    assert mask is not None
    return _unfused(q, k, v, dropout, mask)


def _explicit(q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout, mask: Tensor | None, s: int) -> Tensor:
    """Return attention with dropout by torch's operators, with an fp32 softmax. `s`: tokens of a full sample."""
    queries, keys, d = q.shape[-2], *k.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
    scores = _by_keys(q, k.transpose(-1, -2)) / math.sqrt(d)
    weights = (
        (scores.float() if mask is None else scores.float() + mask)
        .masked_fill(future, float("-inf"))
        .softmax(-1)
        .to(q.dtype)
    )
    return _by_keys(weights * dropout.keep(weights, s) / (1 - dropout.p), v)


def _by_keys(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y for heads x [b, a, ...] and y [b, a/g, ...], where g consecutive heads of x share one y."""
    b, a, s, _ = x.shape
    if y.shape[1] == a:
        return x @ y
    return (x.reshape(b, y.shape[1], -1, x.shape[-1]) @ y).view(b, a, s, -1)


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: WeightDropout | None,
    mask: Tensor | None,
    operators: OperatorSet,
) -> Tensor:
    """Return attention by operators that read or write the stored scores 4 times in forward and 7 in backward."""
    scores, scale = _scores(q, k, mask), 1 / math.sqrt(q.shape[-1])
    if operators is OperatorSet.SOFTMAX and not has_fused_softmax(*scores.shape[:3]):
        weights = _softmax_apart(scores, scale)
    else:
        weights = kernels.causal_softmax(scores, scale, plain=operators.plain)
    return _by_keys(weights if dropout is None else dropout(weights, operators.plain), v)


def _softmax_apart(scores: Tensor, scale: float) -> Tensor:
    """Return the softmax of masked scores by five operators, as Megatron-LM does for sizes without a fused softmax."""
    s = scores.shape[-1]
    future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
    return (scores.float() * scale).masked_fill_(future, -MASK_PENALTY).softmax(-1).to(scores.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention scores q k^T plus `mask` times sqrt(d), a factor that the scaling by 1/sqrt(d) cancels."""
    products = _by_keys(q, k.transpose(-1, -2))
    return products if mask is None else torch.add(products, mask, alpha=math.sqrt(q.shape[-1]))


def _unfused(q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None, mask: Tensor) -> Tensor:
    """Return attention by unfused operators, which read or write the scores 10 times in forward and 11 in backward."""
    scores = q @ k.transpose(-1, -2)
    scores = scores / math.sqrt(q.shape[-1])
    scores = torch.mul(scores, mask) - MASK_PENALTY * (1.0 - mask)
    weights = scores.softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ v


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` to `y` in place, as torch's linear layer did for inputs [b, s, h] until 2020; return `y`."""
    return y.add_(bias)


def unfused_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(y + bias) in two operators; the sum overwrites `y`."""
    return F.gelu(add_bias(y, bias), approximate="tanh")


def unfused_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return residual + drop(x + bias), computed by separate operators; a summand that is None is omitted."""
    y = drop(x if bias is None else x + bias)
    return y if residual is None else residual + y
