"""Tests of bias and tanh GELU against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import bias_gelu
from repro.kernels.gelu import reference
from tests.kernels.gradients import Close, assert_matches, in_fp64, saved_for_backward, with_gradients


def test_gelu_matches_fp64(dtype: torch.dtype, close: Close) -> None:
    x, bias, grad = ((torch.randn(s) * 3).to(dtype) for s in ((3, 5, 40), (40,), (3, 5, 40)))
    assert_matches(bias_gelu, reference, grad, [x, bias], close)


def test_extreme_values_do_not_overflow() -> None:
    x = torch.tensor([[-1e30, -100.0, -6.0, -0.0, 6.0, 100.0, 1e12, float("nan")]])
    y, dx, _ = with_gradients(bias_gelu, torch.ones_like(x), x, torch.zeros(8))
    torch.testing.assert_close(
        y[0, 1:7], reference(x.double(), torch.zeros(8))[0, 1:7].float(), atol=1e-6, rtol=1e-6
    )
    assert y[0, 0] == 0
    assert dx[0, [1, 5, 6]].tolist() == [0, 1, 1]
    assert y[0, 7].isnan()


def test_gelu_saves_only_its_arguments() -> None:
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    saved = saved_for_backward(lambda: bias_gelu(x, bias))
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), bias.data_ptr()]


def test_gradcheck() -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 5), (5,))]
    assert torch.autograd.gradcheck(bias_gelu, leaves)


@settings(max_examples=30)
@given(rows=st.integers(0, 60), f=st.integers(1, 50), seed=st.integers(0, 1000))
def test_any_sizes_and_strides(rows: int, f: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(f, rows, generator=generator).t() for _ in range(2))
    bias = torch.randn(f, generator=generator)
    actual = with_gradients(bias_gelu, grad, x, bias)
    for a, e in zip(actual, in_fp64(reference, grad, x, bias), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)


def test_mismatched_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias of \[3\], not \[4\]"):
        bias_gelu(torch.ones(2, 3), torch.ones(4))
