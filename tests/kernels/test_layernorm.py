"""Tests of layer norm and RMS norm with special values and with long rows; `test_differentiable.py` has usual rows."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from repro.kernels import column_sums, layer_norm, layernorm, rms_norm, rmsnorm
from tests.kernels.gradients import assert_close, assert_matches_fp64, with_gradients
from tests.kernels.on_cpu import Host, placed


@pytest.mark.usefixtures("implementation")
def test_rows_with_a_large_mean_stay_accurate() -> None:
    x, weight, bias = torch.randn(40, 64) + 1000, torch.ones(64), torch.zeros(64)
    expected = layernorm.reference(x.double(), weight.double(), bias.double())
    assert_close(layer_norm(x, weight, bias), expected, 100)


@pytest.mark.usefixtures("implementation")
def test_non_finite_values_stay_in_their_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    x[2, 60] = float("inf")
    y, slope, _ = with_gradients(
        lambda x, weight: layer_norm(x, weight, torch.zeros(64)), torch.ones(3, 64), x, torch.ones(64)
    )
    for result in (y, slope):
        assert result[0].isfinite().all()
        assert result[1:].isnan().all()


def test_epsilon_is_added_to_the_mean_square() -> None:
    """The divisor is sqrt(variance + eps): sqrt(1 + 3) for the row (-1, 1), and sqrt(3e-5 + 1e-5) for the small row."""
    row, weight, bias = torch.tensor([[-1.0, 1.0]]), torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0])
    small, root = row * math.sqrt(3e-5), math.sqrt(0.75)
    for function in (layer_norm, partial(layer_norm, plain=True), layernorm.reference):
        torch.testing.assert_close(function(row, weight, bias, eps=3.0), torch.tensor([[0.0, 3.0]]))
        torch.testing.assert_close(
            function(small, weight, bias), torch.tensor([[1 - 2 * root, 1 + 4 * root]])
        )
    for function in (rms_norm, partial(rms_norm, plain=True), rmsnorm.reference):
        torch.testing.assert_close(function(row, weight, eps=3.0), torch.tensor([[-1.0, 2.0]]))
        torch.testing.assert_close(function(small, weight), torch.tensor([[-2 * root, 4 * root]]))


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(
    ("shape", "kind", "weights"),
    [
        ((3, 33024), torch.bfloat16, torch.bfloat16),
        ((1, 2, 16387), torch.float16, torch.float32),
        ((5, 12288), torch.float32, torch.float32),  # in forward, a block stores a row
    ],
)
def test_rows_longer_than_a_block(
    implementation: Host | None,
    shape: tuple[int, ...],
    kind: torch.dtype,
    weights: torch.dtype,
    centred: bool,
) -> None:
    if implementation is None:
        pytest.skip("torch has no limit of the row length")
    x, untouched = placed((3 * torch.randn(shape) + 5).to(kind))
    grad = torch.randn(shape).to(kind)
    vectors = [torch.randn(shape[-1]).to(weights) for _ in range(1 + centred)]
    functions = (layer_norm, layernorm.reference) if centred else (rms_norm, rmsnorm.reference)
    assert_matches_fp64(*(partial(each, eps=0.5) for each in functions), grad, x, *vectors)
    assert implementation.launched == ["forward", "means", "gradients", "column_sums"]
    untouched()


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize(("limit", "threads"), [(32, 1024), (16, 512)], ids=["forward", "backward"])
def test_row_shapes_fit_the_limit_of_threads(width: int, limit: int, threads: int) -> None:
    for size in (1, 7, 64, 1023, 1600, 4256, 5120, 8191, 8192):
        shape = column_sums.row_shape(size, width, limit, threads)
        assert shape is not None, size
        assert shape[0] % 32 == 0
        assert shape[0] <= threads
        assert shape[1] * width <= limit
        assert shape[0] * shape[1] * width >= size
