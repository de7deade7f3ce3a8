"""Tests of the CUDA sources of bias and GELU, and of bias, dropout and residual, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import column_sums, dropout, gelu, random
from repro.kernels.cuda.program import TYPES, Unavailable
from tests.kernels.gradients import in_fp64
from tests.kernels.on_cpu import Host, placed

KINDS = [torch.float32, torch.float16, torch.bfloat16]
CASES = [((5, 3, 16), torch.bfloat16, 0), ((70, 48), torch.float32, 0), ((9, 7), torch.float16, 0)]
"""Shape and dtype of x, and its offset from an aligned address, in elements."""


@pytest.mark.parametrize(("shape", "kind", "offset"), [*CASES, ((33, 16), torch.float32, 1)])
def test_gelu_matches_fp64_reference(
    host: Host, shape: tuple[int, ...], kind: torch.dtype, offset: int, close: Callable[..., None]
) -> None:
    x, untouched_x = placed((3 * torch.randn(shape)).to(kind), offset)
    grad, untouched_grad = placed(torch.randn(shape).to(kind))
    bias = torch.randn(shape[-1]).to(kind)
    expected, *slopes = in_fp64(gelu.reference, grad, x, bias)
    close(host.call(gelu.launch_bias_gelu, x, bias), expected, 2)
    for actual, slope in zip(host.call(gelu.launch_bias_gelu_backward, grad, x, bias), slopes, strict=True):
        close(actual, slope, 4)
    untouched_x()
    untouched_grad()


@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90) | st.sampled_from([8, 64, 264]),
    kind=st.sampled_from(KINDS[:2]),
    offset=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_gelu_of_any_size_and_alignment(
    host: Host, rows: int, columns: int, kind: torch.dtype, offset: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, untouched = placed((3 * torch.randn(rows, columns)).to(kind), offset)
    bias, grad = torch.randn(columns).to(kind), torch.randn(rows, columns).to(kind)
    tolerance = 4e-6 if kind == torch.float32 else 3e-3
    for actual, value in zip(
        [
            host.call(gelu.launch_bias_gelu, x, bias),
            *host.call(gelu.launch_bias_gelu_backward, grad, x, bias),
        ],
        in_fp64(gelu.reference, grad, x, bias),
        strict=True,
    ):
        torch.testing.assert_close(actual.double(), value, rtol=tolerance, atol=tolerance * (1 + rows))
    untouched()


def test_gelu_of_extreme_and_non_finite_values(host: Host) -> None:
    x = torch.tensor([[-1e20, -50.0, 50.0, 1e20], [float("nan"), float("inf"), 0.0, -0.0]])
    y = host.call(gelu.launch_bias_gelu, x, torch.zeros(4))
    torch.testing.assert_close(y[0], torch.tensor([0.0, 0.0, 50.0, 1e20]), rtol=1e-6, atol=1e-6)
    assert y[1, 0].isnan()
    assert y[1, 1].isinf()
    assert torch.equal(y[1, 2:], torch.zeros(2))


@settings(max_examples=10)
@given(
    kind=st.sampled_from(KINDS[:2]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([7, 8, 72])),
    place=st.tuples(st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 30)),
    extra=st.integers(0, 20),
    p=st.sampled_from([0.1, 0.5]),
    given=st.sampled_from([(True, True), (False, False)]),
    jump=st.sampled_from([0, 1, 40]),
)
def test_dropout_matches_fp64_reference(
    host: Host,
    kind: torch.dtype,
    shape: tuple[int, int, int],
    place: tuple[int, int, int],
    extra: int,
    p: float,
    given: tuple[bool, bool],
    jump: int,
) -> None:
    key, first_sample, first_position = place
    arguments = (p, key, first_sample, first_position + shape[1] + extra + jump, first_position)
    further = (shape[1] // 2, jump)
    x = torch.randn(shape).to(kind)
    bias = torch.randn(shape[-1]).to(kind) if given[0] else None
    residual = torch.randn(shape).to(kind) if given[1] else None
    wide = [None if t is None else t.double().requires_grad_() for t in (x, bias, residual)]
    expected = dropout.reference(*wide, *arguments, True, *further)  # type: ignore[arg-type]
    y = host.call(dropout.launch_bias_dropout_residual, x, bias, residual, *arguments, *further)
    tolerance = 2e-6 if kind == torch.float32 else 2e-3
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    # With a key in device memory, the arguments for key and sample are ignored.
    replayed = (p, 0, 0, *arguments[3:], *further, torch.tensor(random.device_key(key, first_sample)))
    again = host.call(dropout.launch_bias_dropout_residual, x, bias, residual, *replayed)
    assert torch.equal(again, y)
    grad = torch.randn(shape).to(kind)
    inputs = [t for t in wide[:2] if t is not None]
    slopes = torch.autograd.grad(expected, inputs, grad.double())
    has_bias = bias is not None
    results = host.call(dropout.launch_bias_dropout_residual_backward, grad, has_bias, *arguments, *further)
    repeated = host.call(dropout.launch_bias_dropout_residual_backward, grad, has_bias, *replayed)
    assert all(torch.equal(*pair) for pair in zip(repeated, results, strict=True))
    # Exactly the same elements are dropped.
    assert torch.equal(results[0] == 0, (slopes[0] == 0) | (grad == 0))
    for actual, slope in zip(results, slopes, strict=has_bias):
        torch.testing.assert_close(actual.double(), slope, rtol=tolerance, atol=8 * tolerance)


def test_only_nan_values_that_are_not_dropped_remain(host: Host) -> None:
    x = torch.full((1, 50, 8), float("nan"))
    keep = random.keep_mask(torch.arange(50), 8, 0.4, 11).view(1, 50, 8)
    y = host.call(dropout.launch_bias_dropout_residual, x, None, None, 0.4, 11, 0, 50, 0)
    assert torch.equal(y.isnan(), keep)
    assert torch.equal(y[~keep], torch.zeros(int((~keep).sum())))


def test_p_0_empty_tensors_and_refused_dtypes(host: Host) -> None:
    x, bias, residual = torch.randn(2, 5, 9), torch.randn(9), torch.randn(2, 5, 9)
    y = host.call(dropout.launch_bias_dropout_residual, x, bias, residual, 0.0, 1, 0, 5, 0)
    assert torch.equal(y, x + bias + residual)
    none = torch.ones(0, 5, 9)
    assert host.call(dropout.launch_bias_dropout_residual, none, bias, none, 0.1, 1, 0, 5, 0).shape == (
        0,
        5,
        9,
    )
    assert host.call(dropout.launch_bias_dropout_residual_backward, none, True, 0.1, 1, 0, 5, 0)[1].shape == (
        9,
    )
    with pytest.raises(Unavailable, match="dtype of x"):
        host.call(dropout.launch_bias_dropout_residual, x, bias, residual.half(), 0.1, 1, 0, 5, 0)
    with pytest.raises(Unavailable, match="dtype of x"):
        host.call(gelu.launch_bias_gelu_backward, x.half(), x, bias)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 10**6),
    vectors=st.integers(1, 7000),
    processors=st.integers(1, 132),
    width=st.sampled_from([1, 8]),
)
def test_a_grid_covers_every_row_and_column(rows: int, vectors: int, processors: int, width: int) -> None:
    class Size:
        def __init__(self) -> None:
            self.processors = processors

    blocks, at_once = column_sums.row_grid(Size(), rows, vectors * width, width, 256)  # type: ignore[arg-type]
    assert 1 <= at_once <= rows
    assert blocks * 256 >= at_once * vectors


def test_column_sums_match_torch(host: Host, dtype: torch.dtype, close: Callable[..., None]) -> None:
    matrices: Tensor = torch.randn(2, 45, 70)
    loaded = host.load(column_sums.program(TYPES[dtype]))
    found = host.call(lambda on, x: column_sums.launch_column_sums(loaded, x, dtype), matrices)
    close(found, matrices.double().sum(1), 2)


@pytest.mark.parametrize("shape", [(45, 64), (3, 70), (1, 8), (700, 24)], ids=str)
def test_sums_over_rows_match_torch(
    shape: tuple[int, int], host: Host, dtype: torch.dtype, close: Callable[..., None]
) -> None:
    rows = torch.randn(shape).to(dtype)
    close(host.call(column_sums.launch_sum_rows, rows), rows.double().sum(0), 2)


def test_sums_over_no_rows_are_zero(host: Host) -> None:
    assert host.call(column_sums.launch_sum_rows, torch.ones(0, 5)).tolist() == [0] * 5
