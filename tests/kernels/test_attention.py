"""Tests of causal attention against its definition, and of its shapes on the meta device."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import causal_attention
from repro.kernels.attention import reference
from repro.model.operator_sets import alibi_bias, alibi_slopes


@pytest.mark.parametrize(
    ("b", "heads", "key_heads", "queries", "keys", "biased"),
    [
        (1, 1, 1, 1, 1, False),
        (2, 3, 3, 33, 33, False),
        (2, 6, 1, 9, 9, True),
        (2, 6, 2, 9, 9, False),
        (2, 6, 6, 9, 9, True),
        (2, 6, 2, 3, 9, True),
        (2, 6, 6, 3, 9, False),
        (2, 6, 1, 3, 9, False),
    ],
)
def test_attention_matches_its_definition_and_meta_shapes(
    b: int, heads: int, key_heads: int, queries: int, keys: int, biased: bool
) -> None:
    """Queries are the last positions of the sequence; cases have ALiBi's bias and grouped-query heads."""
    torch.manual_seed(0)
    inputs = [torch.randn(b, n, keys, 4, dtype=torch.float64) for n in (heads, key_heads, key_heads)]
    full_bias = alibi_bias(heads, range(heads), range(keys), inputs[0]) if biased else None
    expected = reference(*inputs, full_bias)[:, :, keys - queries :]
    inputs = [x.requires_grad_() for x in (inputs[0][:, :, keys - queries :].clone(), *inputs[1:])]
    bias = alibi_bias(heads, range(heads), range(keys - queries, keys), inputs[0]) if biased else None
    found = causal_attention(*inputs, bias)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    actual = torch.autograd.grad(found, inputs, upstream)
    for a, e in zip(actual, torch.autograd.grad(reference(*inputs, bias), inputs, upstream), strict=True):
        torch.testing.assert_close(a, e)
    shapes_only = [torch.empty_like(x, device="meta", dtype=torch.float16).requires_grad_() for x in inputs]
    on_meta = causal_attention(*shapes_only, None if bias is None else bias.half().to("meta"))
    assert on_meta.shape == found.shape
    gradients = torch.autograd.grad(on_meta, shapes_only, torch.empty_like(on_meta))
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_alibi_slopes_and_bias_by_hand() -> None:
    """2108.12409 sec. 3: 8 heads have 1/2 to 1/256; 3 heads have the slopes of 2 heads and the first of 4."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    inf = float("inf")
    bias = alibi_bias(8, range(1, 2), range(3), torch.empty(0, dtype=torch.float16))
    assert bias.tolist() == [[[[0, -inf, -inf], [-0.25, 0, -inf], [-0.5, -0.25, 0]]]]


def test_attention_on_meta_allocates_no_scores() -> None:
    from repro.measure.memory import MemoryTracker

    inputs = [
        torch.empty(2, 3, 512, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)
    ]
    tracker = MemoryTracker()
    tracker.phase = "forward"
    with tracker:
        y = causal_attention(*inputs)
        y.backward(torch.empty_like(y))
    assert (y.shape, y.dtype) == (inputs[0].shape, torch.bfloat16)
    assert tracker.peak["total"] < 2 * 3 * 512 * 512 * 2, "bytes of the scores"
