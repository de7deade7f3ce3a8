"""Comparison of results and gradients with a reference in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_close(
    actual: Tensor, expected: Tensor, roundings: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Assert that a tensor equals its value in fp64 within `roundings` roundings of a dtype, by default its own."""
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    epsilon = EPSILON[dtype or actual.dtype] * roundings
    torch.testing.assert_close(actual.double(), expected.double(), rtol=epsilon, atol=epsilon * scale)


def with_gradients(function: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]  # of the same memory, to retain the alignment
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_matches_fp64(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    grad: Tensor,
    *tensors: Tensor,
    roundings: int = 2,
    dtype: torch.dtype | None = None,
) -> None:
    """Compare a function and its gradients with the reference in fp64; the function writes to no argument."""
    given = (grad, *tensors)
    before, wide = [t.clone() for t in given], [t.double() for t in given]
    actual = with_gradients(function, *given)
    for a, e, t, old in zip(actual, with_gradients(reference, *wide), given, before, strict=True):
        assert torch.equal(t, old)
        assert a.dtype == t.dtype
        assert_close(a, e, max(roundings, 8 if a.dtype == torch.float32 else 0), dtype)
