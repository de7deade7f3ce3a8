"""Tests of layer norm against the fp64 reference."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import layer_norm
from repro.kernels.layernorm import forward_operator, reference
from tests.kernels.gradients import Close, assert_matches, in_fp64, saved_for_backward, with_gradients


@pytest.mark.parametrize("shape", [(4, 7, 64), (3, 33), (1, 1, 8)])
def test_layer_norm_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype, close: Close) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    weight, bias, grad = (torch.randn(s).to(dtype) for s in (shape[-1], shape[-1], shape))
    assert_matches(layer_norm, reference, grad, [x, weight, bias], close)


def test_fp32_weights_with_16_bit_rows(close: Close) -> None:
    x, weight, bias = torch.randn(5, 16).bfloat16(), torch.randn(16), torch.randn(16)
    y, dx, dweight, _ = with_gradients(layer_norm, torch.ones(5, 16).bfloat16(), x, weight, bias)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    close(y, reference(x.double(), weight.double(), bias.double()))


def test_statistics_are_fp32_and_saved_for_backward(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, 3, 8).to(dtype), torch.ones(8).to(dtype), torch.zeros(8).to(dtype)
    _, mean, rstd = forward_operator(x, weight, bias, 1e-5)
    assert mean.dtype == rstd.dtype == torch.float32
    assert mean.shape == rstd.shape == (2, 3, 1)
    saved = saved_for_backward(lambda: layer_norm(x.requires_grad_(), weight, bias))
    assert sorted(t.shape for t in saved) == sorted([x.shape, mean.shape, rstd.shape, weight.shape])


def test_rows_with_a_large_mean_stay_accurate(close: Close) -> None:
    x = torch.randn(4, 256, dtype=torch.float64) + 1000
    y = layer_norm(x.float(), torch.ones(256), torch.zeros(256))
    close(
        y, reference(x.float().double(), torch.ones(256).double(), torch.zeros(256).double()), roundings=100
    )


@pytest.mark.parametrize("plain", [False, True], ids=["", "plain"])
def test_gradcheck(plain: bool) -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 5), (5,), (5,))]
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, plain=plain), leaves)


@settings(max_examples=30)
@given(rows=st.integers(0, 40), h=st.integers(1, 70), seed=st.integers(0, 1000))
def test_any_sizes_and_strides(rows: int, h: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(h, rows, generator=generator).t()
    grad = torch.randn(h, rows, generator=generator).t()
    weight, bias = torch.randn(h, generator=generator), torch.randn(h, generator=generator)
    # A large epsilon, because rows of one or two nearly equal values give a quotient of rounding errors.
    actual = with_gradients(lambda *t: layer_norm(*t, eps=1e-1), grad, x, weight, bias)
    expected = in_fp64(lambda *t: reference(*t, eps=1e-1), grad, x, weight, bias)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-4)


def test_epsilon_is_added_to_the_variance() -> None:
    """The divisor is sqrt(variance + eps): sqrt(1 + 3) for the row (-1, 1), and sqrt(3e-5 + 1e-5) for the small row."""
    row = torch.tensor([[-1.0, 1.0]])
    weight, bias = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0])
    small = row * math.sqrt(3e-5)
    for function in (layer_norm, partial(layer_norm, plain=True), reference):
        torch.testing.assert_close(function(row, weight, bias, eps=3.0), torch.tensor([[0.0, 3.0]]))
        expected = torch.tensor([[1 - 2 * math.sqrt(0.75), 1 + 4 * math.sqrt(0.75)]])
        torch.testing.assert_close(function(small, weight, bias), expected)


def test_mismatched_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_norm of \[2, 3\]"):
        layer_norm(torch.ones(2, 3), torch.ones(4), torch.ones(4))
