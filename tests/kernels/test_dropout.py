"""Tests of bias, dropout and residual: values, and a mask that does not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import bias_dropout_residual, keep_mask
from repro.kernels.dropout import reference
from tests.kernels.gradients import Close, saved_for_backward


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", ""])
def test_dropout_matches_fp64(p: float, bias: bool, residual: bool, dtype: torch.dtype, close: Close) -> None:
    shapes = [(2, 5, 24), (24,) if bias else None, (2, 5, 24) if residual else None]
    tensors = [None if s is None else torch.randn(s).to(dtype) for s in shapes]
    grad = torch.randn(2, 5, 24).to(dtype)
    arguments = (p, 77, 3, 11, 4, True)

    def run(function: Callable[..., Tensor], to: torch.dtype) -> list[Tensor]:
        leaves = [None if t is None else t.to(to).requires_grad_() for t in tensors]
        y = function(*leaves, *arguments)
        return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], grad.to(to))]

    for a, e in zip(run(bias_dropout_residual, dtype), run(reference, torch.float64), strict=True):
        assert a.dtype == dtype
        close(a, e, roundings=3)


def test_dropped_elements_are_those_of_keep_mask() -> None:
    x = torch.ones(2, 3, 16)
    y = bias_dropout_residual(x, None, None, 0.4, 5, 6, 10, 2, True)
    rows = torch.tensor([(6 + i) * 10 + 2 + j for i in range(2) for j in range(3)])
    kept = keep_mask(rows, 16, 0.4, 5).view(2, 3, 16)
    torch.testing.assert_close(y, kept / 0.6)


@settings(max_examples=25)
@given(
    b=st.integers(1, 5),
    s=st.integers(1, 9),
    h=st.integers(1, 9),
    key=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_mask_is_the_same_in_every_layout(b: int, s: int, h: int, key: int, data: st.DataObject) -> None:
    x, bias, residual = torch.randn(b, s, h), torch.randn(h), torch.randn(b, s, h)
    first = data.draw(st.integers(0, 2**31))
    full = bias_dropout_residual(x, bias, residual, 0.3, key, first, s, 0, True)
    batch_cut, sequence_cut = data.draw(st.integers(0, b)), data.draw(st.integers(0, s))
    for samples in (slice(0, batch_cut), slice(batch_cut, b)):
        for positions in (slice(0, sequence_cut), slice(sequence_cut, s)):
            part = bias_dropout_residual(
                x[samples, positions],
                bias,
                residual[samples, positions],
                0.3,
                key,
                first + samples.start,
                s,
                positions.start,
                True,
            )
            assert torch.equal(part, full[samples, positions])


def test_context_parallel_rows_have_their_global_mask() -> None:
    """A rank of context parallelism has two chunks of a sequence: rows 1, 2 and rows 7, 8, 9 of 10."""
    x, bias = torch.randn(2, 10, 16), torch.randn(16)
    full = bias_dropout_residual(x, bias, x, 0.4, 5, 6, 10, 0, True)
    rows = torch.tensor([1, 2, 7, 8, 9])
    part = x[:, rows].requires_grad_()
    found = bias_dropout_residual(part, bias, part.detach(), 0.4, 5, 6, 10, 1, True, 2, 4)
    assert torch.equal(found, full[:, rows])
    (slope,) = torch.autograd.grad(found.sum(), part)
    torch.testing.assert_close(
        slope, (keep_mask(torch.arange(60, 80), 16, 0.4, 5) / 0.6).view(x.shape)[:, rows]
    )


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, bias = torch.randn(3, 7, 5).to(dtype), torch.randn(5).to(dtype)
    call = lambda: bias_dropout_residual(x, bias, x, 0.3, 1, 0, 7, 0, True)
    expected = call()
    monkeypatch.setattr("repro.kernels.library.CPU_CHUNK", 11)
    assert torch.equal(expected, call())


def test_dropout_saves_nothing_for_backward() -> None:
    x, bias = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert not saved_for_backward(lambda: bias_dropout_residual(x, bias, x, 0.1, 1, 0, 3, 0, True))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_no_mask_is_computed_at_p_0(p: float, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a mask was computed")

    monkeypatch.setattr("repro.kernels.random.factors", forbidden)
    x, bias = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = bias_dropout_residual(x, bias, x, p, 1, 0, 3, 0, training)
    y.sum().backward()
    for found in (y, reference(x, bias, x, p, 1, 0, 3, 0, training)):
        torch.testing.assert_close(found, 2 * x + bias)
    assert bias_dropout_residual(x, None, None, p, 1, 0, 3, 0, training) is x


def test_operands_are_never_written() -> None:
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    before = x.clone(), residual.clone()
    for p in (0.0, 0.3):
        for r in (residual, None):
            bias_dropout_residual(x, torch.ones(8), r, p, 1, 0, 3, 0, True)
            bias_dropout_residual(x, None, r, p, 1, 0, 3, 0, True)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradcheck(p: float) -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (4,), (2, 3, 4))]
    assert torch.autograd.gradcheck(lambda *t: bias_dropout_residual(*t, p, 9, 0, 3, 0, True), leaves)


def test_invalid_arguments_are_refused() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="probability is 1"):
        bias_dropout_residual(x, None, x, 1.0, 1, 0, 3, 0, True)
    with pytest.raises(ValueError, match="bias of"):
        bias_dropout_residual(x, torch.ones(3), x, 0.1, 1, 0, 3, 0, True)
    with pytest.raises(ValueError, match="residual"):
        bias_dropout_residual(x, None, torch.ones(4), 0.1, 1, 0, 3, 0, True)
