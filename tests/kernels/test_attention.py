"""Causal attention against its definition, and its shapes on meta against what runs."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import causal_attention
from repro.kernels.attention import reference


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
