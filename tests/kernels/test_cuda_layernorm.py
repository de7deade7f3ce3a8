"""Tests of the CUDA source of layer norm on the CPU, against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import column_sums, layernorm, rmsnorm
from repro.kernels import layernorm as binding
from repro.kernels.cuda.program import Unavailable
from tests.kernels.gradients import in_fp64
from tests.kernels.on_cpu import Host, placed

CASES = [
    ((5, 3, 136), torch.bfloat16, torch.bfloat16, 0),
    ((7, 1600), torch.float16, torch.float32, 0),
    ((3, 2, 37), torch.float32, torch.float32, 0),
    ((40, 64), torch.float32, torch.float32, 1),
]
"""Shape and dtype of x, dtype of the weights, and offset of x from an aligned address, in elements."""
EPS = 0.5
"""Epsilon that is not negligible relative to a variance of 9."""


@pytest.mark.parametrize(("shape", "kind", "weights", "offset"), CASES)
def test_layer_norm_matches_fp64(
    host: Host,
    shape: tuple[int, ...],
    kind: torch.dtype,
    weights: torch.dtype,
    offset: int,
    close: Callable[..., None],
) -> None:
    x, untouched_x = placed((3 * torch.randn(shape) + 5).to(kind), offset)
    grad, untouched_grad = placed(torch.randn(shape).to(kind))
    weight, bias = torch.randn(shape[-1]).to(weights), torch.randn(shape[-1]).to(weights)
    expected, *slopes = in_fp64(lambda *t: layernorm.reference(*t, eps=EPS), grad, x, weight, bias)
    y, mean, rstd = host.call(binding.launch_layer_norm, x, weight, bias, EPS)
    close(y, expected, 2)
    assert mean.shape == rstd.shape == (*shape[:-1], 1)
    close(mean, x.double().mean(-1, keepdim=True))
    close(rstd, (x.double().var(-1, keepdim=True, unbiased=False) + EPS).rsqrt(), 2)
    for actual, slope in zip(
        host.call(binding.launch_layer_norm_backward, grad, x, mean, rstd, weight), slopes, strict=True
    ):
        close(actual, slope, 8 if actual.dtype == torch.float32 else 2)
    untouched_x()
    untouched_grad()


@settings(max_examples=10)
@given(case=st.sampled_from(CASES), rows=st.integers(1, 30), seed=st.integers(0, 99))
def test_layer_norm_of_any_number_of_rows(
    host: Host, case: tuple[tuple[int, ...], torch.dtype, torch.dtype, int], rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    (*_, columns), kind, weights, offset = case
    x, untouched = placed((3 * torch.randn(rows, columns) + 5).to(kind), offset)
    grad = torch.randn(rows, columns).to(kind)
    weight, bias = torch.randn(columns).to(weights), torch.randn(columns).to(weights)
    y, mean, rstd = host.call(binding.launch_layer_norm, x, weight, bias, 1e-5)
    found = host.call(binding.launch_layer_norm_backward, grad, x, mean, rstd, weight)
    for actual, value in zip([y, *found], in_fp64(layernorm.reference, grad, x, weight, bias), strict=True):
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[actual.dtype]
        torch.testing.assert_close(actual.double(), value, rtol=tolerance, atol=tolerance * (1 + rows**0.5))
    untouched()


def test_rows_with_a_large_mean_stay_accurate(host: Host, close: Callable[..., None]) -> None:
    x = 1000 + torch.randn(4, 64)
    y = host.call(binding.launch_layer_norm, x, torch.ones(64), torch.zeros(64), 1e-5)[0]
    close(y, layernorm.reference(x.double(), torch.ones(64), torch.zeros(64)), 100)


def test_non_finite_values_stay_in_their_row(host: Host) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    x[2, 60] = float("inf")
    y, mean, rstd = host.call(binding.launch_layer_norm, x, torch.ones(64), torch.zeros(64), 1e-5)
    assert y[0].isfinite().all()
    assert y[1:].isnan().all()
    dx = host.call(binding.launch_layer_norm_backward, torch.ones(3, 64), x, mean, rstd, torch.ones(64))[0]
    assert dx[0].isfinite().all()
    assert dx[1:].isnan().all()


def test_empty_tensors_and_refused_dtypes(host: Host) -> None:
    one = torch.ones(8)
    assert host.call(binding.launch_layer_norm, torch.ones(0, 8), one, one, 1e-5)[1].shape == (0, 1)
    assert host.call(
        binding.launch_layer_norm_backward, *[torch.ones(0, 8)] * 2, *[torch.ones(0, 1)] * 2, one
    )[1].shape == (8,)
    with pytest.raises(Unavailable, match="float64"):
        host.call(binding.launch_layer_norm, torch.ones(2, 8).double(), one.double(), one.double(), 1e-5)
    with pytest.raises(Unavailable, match="one dtype"):
        host.call(binding.launch_layer_norm, torch.ones(2, 8), one, one.half(), 1e-5)
    assert not host.launched


LONG_ROWS = [
    ((3, 33024), torch.bfloat16, torch.bfloat16),
    ((1, 2, 16387), torch.float16, torch.float32),
    ((5, 12288), torch.float32, torch.float32),
]
"""Shape and dtype of x, and dtype of the weights; a block stores rows of the last case in the forward pass."""


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("shape", "kind", "weights"), LONG_ROWS)
def test_rows_longer_than_a_block(
    host: Host,
    shape: tuple[int, ...],
    kind: torch.dtype,
    weights: torch.dtype,
    centred: bool,
    close: Callable[..., None],
) -> None:
    x, untouched_x = placed((3 * torch.randn(shape) + 5).to(kind))
    grad, untouched_grad = placed(torch.randn(shape).to(kind))
    vectors = [torch.randn(shape[-1]).to(weights) for _ in range(1 + centred)]
    reference = (layernorm if centred else rmsnorm).reference
    expected, *slopes = in_fp64(lambda *t: reference(*t, eps=EPS), grad, x, *vectors)
    forward, backward = (
        (binding.launch_layer_norm, binding.launch_layer_norm_backward)
        if centred
        else (binding.launch_rms_norm, binding.launch_rms_norm_backward)
    )
    y, *statistics = host.call(forward, x, *vectors, EPS)
    close(y, expected, 2)
    found = host.call(backward, grad, x, *statistics, vectors[0])
    for actual, slope in zip(found, slopes, strict=True):
        close(actual, slope, 8 if actual.dtype == torch.float32 else 2)
    assert host.launched == ["forward", "means", "gradients", "column_sums"]
    untouched_x()
    untouched_grad()


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_row_shapes_fit_the_limit_of_threads(width: int, backward: bool) -> None:
    limit, threads = (16, 512) if backward else (32, 1024)
    for size in (1, 7, 64, 1023, 1600, 4256, 5120, 8191, 8192):
        shape = column_sums.row_shape(size, width, limit, threads)
        assert shape is not None, size
        assert shape[0] % 32 == 0
        assert shape[0] <= threads
        assert shape[1] * width <= limit
        assert shape[0] * shape[1] * width >= size
