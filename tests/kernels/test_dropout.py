"""Tests of bias, dropout and residual, and of the generator of masks: values that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from repro.kernels import (
    bias_dropout_residual,
    derive_key,
    dropout,
    keep_mask,
    normal,
    random,
    uniform_bits,
)
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
    drawn=st.builds(
        SimpleNamespace,
        kind=st.sampled_from([torch.float32, torch.float16]),
        shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([7, 8, 72])),
        place=st.tuples(st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 30)),
        extra=st.integers(0, 20),
        p=st.sampled_from([0.1, 0.5]),
        has_operands=st.booleans(),
        jump=st.sampled_from([0, 1, 40]),
        chunk=st.integers(1, 300),
    )
)
def test_dropout_of_any_size_and_place(implementation: Host | None, drawn: SimpleNamespace) -> None:
    kind, shape, p, has_operands, jump = drawn.kind, drawn.shape, drawn.p, drawn.has_operands, drawn.jump
    key, first_sample, first_position = drawn.place
    rows = (first_position + shape[1] + drawn.extra + jump, first_position, True, shape[1] // 2, jump)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", drawn.chunk)
        assert_dropout_matches_fp64(shape, kind, has_operands, has_operands, p, key, first_sample, *rows)
    if implementation is not None:  # A key in device memory replaces the arguments for key and sample.
        x = torch.randn(shape).to(kind).requires_grad_()
        bias, residual = (x[0, 0].detach(), x.detach()) if has_operands else (None, None)
        device_key = torch.tensor(random.device_key(key, first_sample))
        expected = bias_dropout_residual(x, bias, residual, p, key, first_sample, *rows)
        found = bias_dropout_residual(x, bias, residual, p, 0, 0, *rows, device_key=device_key)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


def test_only_nan_values_that_are_not_dropped_remain(host: Host) -> None:
    x = torch.full((1, 50, 8), float("nan"))
    keep = keep_mask(torch.arange(50), 8, 0.4, 11).view(1, 50, 8)
    y = host.call(dropout.launch_bias_dropout_residual, x, None, None, 0.4, 11, 0, 50, 0)
    assert torch.equal(y.isnan(), keep)
    assert (y[~keep] == 0).all()


@settings(max_examples=25)
@given(shape=st.tuples(*[st.integers(1, 9)] * 3), key=st.integers(0, 2**63 - 1), data=st.data())
def test_mask_is_the_same_in_every_layout(shape: tuple[int, int, int], key: int, data: st.DataObject) -> None:
    b, s, h = shape
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


MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def scalar_hash(index: int, key: int) -> int:
    z = (mix(key) + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & MASK
    z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & MASK
    return z ^ (z >> 32)


def scalar_bits(row: int, column: int, key: int) -> int:
    r, c = scalar_hash(row, key), scalar_hash(-1 - column, key)
    low, high = 2**32 - 1, 32
    value = ((r & low) + (c & low)) * (((r >> high) | 1) ^ ((c >> high) & ~1)) & low
    return value - 2**32 if value >= 2**31 else value


@settings(max_examples=50)
@given(
    rows=st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
    columns=st.integers(1, 40),
    key=st.integers(0, 2**63 - 1),
)
def test_bits_are_the_documented_integers(rows: list[int], columns: int, key: int) -> None:
    expected = [[scalar_bits(row, column, key) for column in range(columns)] for row in rows]
    assert uniform_bits(torch.tensor(rows), columns, key).tolist() == expected


@settings(max_examples=30)
@given(start=st.integers(0, 2**62), count=st.integers(1, 30), key=st.integers(0, 2**63 - 1))
def test_normal_is_the_documented_quantile(start: int, count: int, key: int) -> None:
    words = [scalar_hash(start + i, key) >> 40 for i in range(count)]
    # The top 24 bits as a signed number choose the interval, as an arithmetic shift gives them.
    middle = [2 * (w - 2**24 if w >= 2**23 else w) + 1 for w in words]
    quantile = torch.tensor([m / 2**24 for m in middle], dtype=torch.float64).erfinv() * 2**0.5
    torch.testing.assert_close(normal(start, count, key, "cpu").double(), quantile, rtol=1e-5, atol=1e-6)


def test_keys_differ_for_every_part_and_order_and_do_not_change_between_versions() -> None:
    assert derive_key(1, 2) == 2150324997807098984
    keys = {derive_key(*parts) for parts in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64 - 1, 5)]}
    assert len(keys) == 8
    assert len({derive_key(7, step, layer) for step in range(200) for layer in range(50)}) == 10000
    assert all(0 <= key < 2**63 for key in keys)


def signs(values: torch.Tensor, bit: int) -> torch.Tensor:
    return ((values >> bit) & 1).double() * 2 - 1


def score(products: torch.Tensor) -> float:
    """Return the sum of independent signs, in standard deviations."""
    return abs(products.sum().item()) / products.numel() ** 0.5


def test_high_bits_are_fair_and_independent() -> None:
    rows, columns, key = 1024, 512, 12345
    values = uniform_bits(torch.arange(rows), columns, key)
    other = uniform_bits(torch.arange(rows), columns, key + 1)
    for bit in range(16, 32):
        s = signs(values, bit)
        assert score(s) < 4.5
        assert score(s[1:] * s[:-1]) < 4.5, "neighbouring rows"
        assert score(s[:, 1:] * s[:, :-1]) < 4.5, "neighbouring columns"
        assert score(s * signs(other, bit)) < 4.5, "neighbouring keys"
        assert score(s * signs(values, bit - 1 if bit > 16 else 31)) < 4.5, "neighbouring bits"
        corners = s[1:, 1:] * s[1:, :-1] * s[:-1, 1:] * s[:-1, :-1]
        assert score(corners) < 4.5, "corners of a square (a sum of row and column hashes would fail)"


def test_masks_of_rows_and_columns_are_uncorrelated() -> None:
    p, rows, columns = 0.1, 1024, 512
    kept = keep_mask(torch.arange(rows), columns, p, 99).double()
    standard = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    assert abs(standard.mean().item()) * (rows * columns) ** 0.5 < 4.5
    for matrix, length in ((standard @ standard.T, columns), (standard.T @ standard, rows)):
        pairs = matrix[~torch.eye(len(matrix), dtype=torch.bool)] / length**0.5
        assert abs(pairs.pow(2).mean().item() - 1) < 0.02
        assert pairs.abs().max().item() < 7


def test_normal_values_have_normal_moments_and_are_independent() -> None:
    count = 400_000
    x, other_key = normal(0, count, 1, "cpu").double(), normal(0, count, 2, "cpu").double()
    assert x.dtype == torch.float64
    assert normal(0, 3, 1, "cpu").dtype == torch.float32
    assert stats.kstest(x[:100_000].numpy(), "norm").pvalue > 1e-3
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean().item() - expected) < 4.5 * (variance / count) ** 0.5
    for pair in (x[1:] * x[:-1], x[256:] * x[:-256], x * other_key):
        assert abs(pair.mean().item()) < 4.5 / count**0.5
    assert torch.isfinite(x).all()
    assert x.abs().max() < 5.5


@settings(max_examples=25)
@given(start=st.integers(0, 2**60), count=st.integers(2, 300), chunk=st.integers(1, 300), data=st.data())
def test_normal_values_of_a_slice_are_a_slice_of_values(
    start: int, count: int, chunk: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, count - 1))
    full = normal(start, count, 11, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        parts = [normal(start, cut, 11, "cpu"), normal(start + cut, count - cut, 11, "cpu")]
    assert torch.equal(full, torch.cat(parts))


def test_probabilities_are_from_0_to_less_than_1() -> None:
    rows = torch.arange(64)
    assert keep_mask(rows, 64, 0.0, 1).all()
    assert not keep_mask(rows, 64, 1 - 1e-12, 1).any()
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="probability"):
            keep_mask(rows, 2, p, 0)


def test_meta_results_have_shapes_and_dtypes() -> None:
    assert uniform_bits(torch.arange(3, device="meta"), 5, 1).shape == (3, 5)
    assert keep_mask(torch.arange(3, device="meta"), 5, 0.1, 1).dtype == torch.bool
    assert normal(0, 2**50, 1, "meta").shape == (2**50,)
