"""Tests of the gradient norm, column sums, layer norm and RMS norm: sizes, special values and long rows.

`test_differentiable.py` has usual rows.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import column_sums, layer_norm, layernorm, norm, norm_squared, rms_norm, rmsnorm
from repro.kernels.cuda.program import TYPES
from tests.kernels.gradients import assert_close, assert_matches_fp64, with_gradients
from tests.kernels.on_cpu import Host, placed


@settings(max_examples=10)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 8, 31, 4099, 16384, 16391]), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    ),
    mixed=st.booleans(),
    chunk=st.integers(17, 5000),
)
def test_norm_of_any_sizes_and_alignments(
    implementation: Host | None, shapes: list[tuple[int, int]], mixed: bool, chunk: int
) -> None:
    kinds = [torch.float16, torch.bfloat16] if mixed else [torch.float32]
    placements = [placed(torch.randn(n).to(kinds[i % len(kinds)]), o) for i, (n, o) in enumerate(shapes)]
    tensors = [tensor for tensor, _ in placements]
    expected = norm.reference([t.double() for t in tensors])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "CPU_CHUNK_ELEMENTS", chunk)
        patch.setattr(norm, "CPU_ROW_ELEMENTS", 16)
        found = [norm_squared(tensors), *([] if implementation else [norm._norm_squared(tensors)])]
    rtol = 2e-6 if implementation else 1e-5  # torch adds the norms of small chunks in fp32
    for result in found:
        assert (result.shape, result.dtype) == ((), torch.float32)
        torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=0)
    for _, check in placements:
        check()


@pytest.mark.usefixtures("implementation")
def test_norm_of_special_values_and_long_sums() -> None:
    x = torch.ones(5000)
    for value in (math.inf, -math.inf, 1e20):
        x[4321] = value
        assert norm_squared([torch.ones(7), x]).item() == math.inf
    x[17] = math.nan
    assert math.isnan(norm_squared([x]).item())
    large = torch.full((1000,), 60000.0).half()
    assert norm_squared([large]).item() == pytest.approx(1000 * 59999.9**2, rel=1e-3)
    assert norm_squared([torch.full((300_000,), 0.1)]).item() == pytest.approx(3000, rel=1e-6)
    assert norm_squared([torch.ones(0), torch.ones(2, 0)]).item() == 0
    with pytest.raises(ValueError, match="at least one"):
        norm_squared([])


def test_norm_of_many_tensors(host: Host) -> None:
    tensors = [torch.full((3,), 0.1)] * (norm.MAX_TENSORS + 2)
    assert host.call(norm.launch_norm_squared, tensors).item() == pytest.approx(0.03 * len(tensors), rel=1e-6)
    assert host.launched == ["partial", "partial", "total"]
    # In fp32, 2^26 + 1 rounds to 2^26, so adding the ones one by one would lose them.
    large = [torch.full((1,), 8192.0), *[torch.ones(1)] * 128]
    # There are 16 blocks, each with several tensors.
    assert host.call(norm.launch_norm_squared, large).item() == 2**26 + 128


@settings(max_examples=60)
@given(
    rows=st.integers(1, 10**6),
    vectors=st.integers(1, 7000),
    processors=st.integers(1, 132),
    width=st.sampled_from([1, 8]),
)
def test_a_grid_covers_every_row_and_column(rows: int, vectors: int, processors: int, width: int) -> None:
    device: Any = SimpleNamespace(processors=processors)
    blocks, at_once = column_sums.row_grid(device, rows, vectors * width, width, 256)
    assert 1 <= at_once <= rows
    assert blocks * 256 >= at_once * vectors


def test_column_sums_of_two_matrices_match_torch(host: Host, dtype: torch.dtype) -> None:
    matrices = torch.randn(2, 45, 70)
    loaded = host.load(column_sums.program(TYPES[dtype]))
    found = host.call(lambda on, x: column_sums.launch_column_sums(loaded, x, dtype), matrices)
    assert_close(found, matrices.double().sum(1), 2)


@pytest.mark.parametrize("shape", [(45, 64), (3, 70), (1, 8), (700, 24), (0, 5)], ids=str)
def test_column_sums_of_a_matrix_match_torch(shape: tuple[int, int], host: Host, dtype: torch.dtype) -> None:
    rows = torch.randn(shape).to(dtype)
    assert_close(host.call(column_sums.launch_sum_rows, rows), rows.double().sum(0), 2)


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
        expected = torch.tensor([[1 - 2 * root, 1 + 4 * root]])
        torch.testing.assert_close(function(small, weight, bias), expected)
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
    implementation: Host | None, shape: tuple[int, ...], kind: Any, weights: Any, centred: bool
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
