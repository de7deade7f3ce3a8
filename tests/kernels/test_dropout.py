"""Tests of bias, dropout and residual: values, and a mask that does not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import bias_dropout_residual, dropout, keep_mask, random
from tests.kernels.gradients import assert_matches_fp64
from tests.kernels.on_cpu import Host


def assert_dropout_matches_fp64(
    shape: tuple[int, int, int], kind: torch.dtype, has_bias: bool, has_residual: bool, *place: Any
) -> None:
    """Compare results and gradients with and without the optional operands."""
    tensors = [torch.randn(shape).to(kind)]
    tensors += [torch.randn(shape[-1]).to(kind)] if has_bias else []
    tensors += [torch.randn(shape).to(kind)] if has_residual else []

    def of_operands(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *t: function(t[0], t[1] if has_bias else None, t[-1] if has_residual else None, *place)

    functions = map(of_operands, (bias_dropout_residual, dropout.reference))
    assert_matches_fp64(*functions, torch.randn(shape).to(kind), *tensors, roundings=3)


@pytest.mark.parametrize(
    ("p", "bias", "residual"),
    [(p, bias, residual) for p in (0.0, 0.5) for bias in (True, False) for residual in (True, False)][:-1],
)
def test_dropout_with_and_without_bias_and_residual(
    p: float, bias: bool, residual: bool, dtype: torch.dtype
) -> None:
    assert_dropout_matches_fp64((2, 5, 24), dtype, bias, residual, p, 77, 3, 11, 4, True)


@settings(max_examples=10)
@given(
    kind=st.sampled_from([torch.float32, torch.float16]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([7, 8, 72])),
    place=st.tuples(st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 30)),
    extra=st.integers(0, 20),
    p=st.sampled_from([0.1, 0.5]),
    has_operands=st.booleans(),
    jump=st.sampled_from([0, 1, 40]),
    chunk=st.integers(1, 300),
)
def test_dropout_of_any_size_and_place(
    implementation: Host | None,
    kind: torch.dtype,
    shape: tuple[int, int, int],
    place: tuple[int, int, int],
    extra: int,
    p: float,
    has_operands: bool,
    jump: int,
    chunk: int,
) -> None:
    key, first_sample, first_position = place
    rows = (first_position + shape[1] + extra + jump, first_position, True, shape[1] // 2, jump)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        assert_dropout_matches_fp64(shape, kind, has_operands, has_operands, p, key, first_sample, *rows)
    if implementation is not None:  # A key in device memory replaces the arguments for key and sample.
        x = torch.randn(shape).to(kind).requires_grad_()
        bias, residual = (x[0, 0].detach(), x.detach()) if has_operands else (None, None)
        device_key = torch.tensor(random.device_key(key, first_sample))
        expected = bias_dropout_residual(x, bias, residual, p, key, first_sample, *rows)
        found = bias_dropout_residual(x, bias, residual, p, 0, 0, *rows, device_key=device_key)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


def test_dropped_elements_are_those_of_keep_mask() -> None:
    x = torch.ones(2, 3, 16)
    y = bias_dropout_residual(x, None, None, 0.4, 5, 6, 10, 2, True)
    rows = torch.tensor([(6 + i) * 10 + 2 + j for i in range(2) for j in range(3)])
    torch.testing.assert_close(y, keep_mask(rows, 16, 0.4, 5).view(2, 3, 16) / 0.6)


def test_only_nan_values_that_are_not_dropped_remain(host: Host) -> None:
    x = torch.full((1, 50, 8), float("nan"))
    keep = keep_mask(torch.arange(50), 8, 0.4, 11).view(1, 50, 8)
    y = host.call(dropout.launch_bias_dropout_residual, x, None, None, 0.4, 11, 0, 50, 0)
    assert torch.equal(y.isnan(), keep)
    assert (y[~keep] == 0).all()


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
            place = (0.3, key, first + samples.start, s, positions.start, True)
            here = (samples, positions)
            assert torch.equal(bias_dropout_residual(x[here], bias, residual[here], *place), full[here])


def test_context_parallel_rows_have_their_global_mask() -> None:
    """A rank of context parallelism has two chunks of a sequence: rows 1, 2 and rows 7, 8, 9 of 10."""
    x, bias = torch.randn(2, 10, 16), torch.randn(16)
    full = bias_dropout_residual(x, bias, x, 0.4, 5, 6, 10, 0, True)
    rows = torch.tensor([1, 2, 7, 8, 9])
    part = x[:, rows].requires_grad_()
    found = bias_dropout_residual(part, bias, part.detach(), 0.4, 5, 6, 10, 1, True, 2, 4)
    assert torch.equal(found, full[:, rows])
    (slope,) = torch.autograd.grad(found.sum(), part)
    kept = keep_mask(torch.arange(60, 80), 16, 0.4, 5).view(x.shape)
    torch.testing.assert_close(slope, (kept / 0.6)[:, rows])


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_no_mask_is_computed_at_p_0(p: float, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.kernels.random.factors", lambda *_: pytest.fail("a mask was computed"))
    x, bias = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = bias_dropout_residual(x, bias, x, p, 1, 0, 3, 0, training)
    y.sum().backward()
    for found in (y, dropout.reference(x, bias, x, p, 1, 0, 3, 0, training)):
        torch.testing.assert_close(found, 2 * x + bias)
    assert bias_dropout_residual(x, None, None, p, 1, 0, 3, 0, training) is x


@pytest.mark.usefixtures("implementation")
def test_p_0_and_empty_tensors() -> None:
    x, bias, residual = torch.randn(2, 5, 9), torch.randn(9, requires_grad=True), torch.randn(2, 5, 9)
    y = bias_dropout_residual(x, bias, residual, 0.0, 1, 0, 5, 0, True)
    torch.testing.assert_close(y, x + bias + residual)
    empty = bias_dropout_residual(x[:0], bias, residual[:0], 0.1, 1, 0, 5, 0, True)
    assert empty.shape == (0, 5, 9)
    assert torch.autograd.grad(empty.sum(), bias)[0].tolist() == [0] * 9
