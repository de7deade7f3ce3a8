"""Causal attention against its definition, and its shapes on meta against what runs."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import causal_attention
from repro.kernels.attention import reference
from repro.model.operator_sets import alibi_bias, alibi_slopes


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 3, 7, 8), (1, 2, 33, 16)])
def test_equals_its_definition(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found, expected = causal_attention(*given), reference(*given)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(shape, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, upstream),
        torch.autograd.grad(expected, given, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("keys", [1, 2, 6])
@pytest.mark.parametrize("biased", [False, True])
def test_shared_keys_and_a_bias(keys: int, biased: bool) -> None:
    """ALiBi's bias, and heads of keys that as many queries in a row use: of the definition, and on meta."""
    torch.manual_seed(0)
    shapes = [(2, heads, 9, 4) for heads in (6, keys, keys)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = alibi_bias(6, range(6), range(9), given[0]) if biased else None
    found, expected = causal_attention(*given, bias), reference(*given, bias)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(shapes[0], dtype=torch.float64)
    mine = torch.autograd.grad(found, given, upstream)
    for a, b in zip(mine, torch.autograd.grad(expected, given, upstream), strict=True):
        torch.testing.assert_close(a, b)
    shapes_only = [torch.empty_like(x, device="meta", dtype=torch.float16).requires_grad_() for x in given]
    on_meta = causal_attention(*shapes_only, None if bias is None else bias.half().to("meta"))
    assert on_meta.shape == found.shape
    gradients = torch.autograd.grad(on_meta, shapes_only, torch.empty_like(on_meta))
    assert [x.shape for x in gradients] == [x.shape for x in given]


@pytest.mark.parametrize("keys", [2, 6])
@pytest.mark.parametrize("biased", [False, True])
def test_queries_that_are_the_last_of_a_sequence(keys: int, biased: bool) -> None:
    """Their rows of the whole sequence's result, and their gradients; on meta their shapes."""
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 9, 4, dtype=torch.float64) for heads in (6, keys, keys)]
    given = [x.requires_grad_() for x in (whole[0][:, :, 6:].clone(), *whole[1:])]
    bias, expected = None, reference(*whole)[:, :, 6:]
    if biased:
        bias = alibi_bias(6, range(6), range(6, 9), whole[0])
        expected = reference(*whole, alibi_bias(6, range(6), range(9), whole[0]))[:, :, 6:]
    found = causal_attention(*given, bias)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    mine = torch.autograd.grad(found, given, upstream)
    for a, b in zip(mine, torch.autograd.grad(reference(*given, bias), given, upstream), strict=True):
        torch.testing.assert_close(a, b)
    shapes_only = [torch.empty_like(x, device="meta", dtype=torch.float16).requires_grad_() for x in given]
    on_meta = causal_attention(*shapes_only, None if bias is None else bias.half().to("meta"))
    gradients = torch.autograd.grad(on_meta, shapes_only, torch.empty_like(on_meta))
    assert [x.shape for x in gradients] == [x.shape for x in given]


def test_alibi_by_hand() -> None:
    """2108.12409 sec. 3: of 8 heads 1/2 to 1/256; of 3 those of 2, and the first of 4."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    inf = float("inf")
    own = alibi_bias(8, range(1, 2), range(3), torch.empty(0, dtype=torch.float16))
    assert own.tolist() == [[[[0, -inf, -inf], [-0.25, 0, -inf], [-0.5, -0.25, 0]]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_on_meta(dtype: torch.dtype) -> None:
    """The same sizes, types and gradients; nothing as large as the scores is made."""
    from repro.measure.memory import MemoryTracker

    given = [torch.empty(2, 3, 512, 8, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    tracker = MemoryTracker()
    tracker.phase = "forward"
    with tracker:
        y = causal_attention(*given)
        y.backward(torch.empty_like(y))
    assert y.shape == given[0].shape
    assert y.dtype == dtype
    assert all(x.grad is not None and x.grad.shape == x.shape for x in given)
    scores = 2 * 3 * 512 * 512 * dtype.itemsize
    assert tracker.peak["total"] < scores
