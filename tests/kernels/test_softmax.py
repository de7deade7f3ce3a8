"""Tests of scale, causal mask and softmax against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import causal_softmax
from repro.kernels.softmax import reference
from tests.kernels.gradients import Close, assert_matches, in_fp64, saved_for_backward, with_gradients
from tests.kernels.test_operators import OperatorNames


@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (4, 16, 16), (1, 1), (2, 1, 33, 33)])
def test_softmax_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype, close: Close) -> None:
    scores, grad = ((torch.randn(shape) * 5).to(dtype) for _ in range(2))
    # The gradient is computed from rounded weights.
    assert_matches(
        lambda t: causal_softmax(t, 0.3), lambda t: reference(t, 0.3), grad, [scores], close, roundings=8
    )


def test_future_positions_have_no_weight_and_no_gradient() -> None:
    scores = torch.randn(2, 7, 7)
    scores[..., 0, 1:] = float("inf")
    y, slope = with_gradients(lambda t: causal_softmax(t, 2.0), torch.randn(2, 7, 7), scores)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert (y[:, future] == 0).all()
    assert (slope[:, future] == 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 7))


def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    y = causal_softmax(torch.full((1, 4, 4), 6e4).to(dtype), 10.0)
    torch.testing.assert_close(y[0, 3], torch.full((4,), 0.25, dtype=dtype))


def test_softmax_saves_only_its_weights() -> None:
    results: list[torch.Tensor] = []
    scores = torch.randn(2, 5, 5, requires_grad=True)
    saved = saved_for_backward(lambda: results.append(causal_softmax(scores, 0.5)))
    assert [t.data_ptr() for t in saved] == [y.data_ptr() for y in results]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_and_backward_dispatch_one_operator_each(device: str) -> None:
    scores = torch.randn(2, 5, 5, device=device, requires_grad=True)
    with OperatorNames() as seen:
        y = causal_softmax(scores, 0.5)
        torch.autograd.grad(y, scores, torch.ones_like(y))
    ours = [call for call in seen.calls if call.startswith("repro.")]
    assert ours == ["repro.causal_softmax.default", "repro.causal_softmax_backward.default"]


def test_gradcheck() -> None:
    scores = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: causal_softmax(x, 0.7), scores)


@settings(max_examples=30)
@given(
    b=st.integers(0, 5),
    s=st.integers(1, 20),
    chunk=st.integers(1, 500),
    scale=st.floats(1e-3, 10),
    seed=st.integers(0, 99),
)
def test_any_sizes_strides_and_chunks(b: int, s: int, chunk: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, grad = (torch.randn(s, b, s, generator=generator).transpose(0, 1) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        actual = with_gradients(lambda t: causal_softmax(t, scale), grad, scores)
    expected = in_fp64(lambda t: reference(t, scale), grad, scores)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_scores_must_be_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs scores \[..., s, s\]"):
        causal_softmax(torch.ones(shape), 1.0)
