"""Tests of the sum of squares of many tensors, and of column sums, against fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import column_sums, norm, norm_squared
from repro.kernels.cuda.program import TYPES
from tests.kernels.gradients import assert_close
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
def test_norm_of_special_values() -> None:
    x = torch.ones(5000)
    for value in (math.inf, -math.inf, 1e20):
        x[4321] = value
        assert norm_squared([torch.ones(7), x]).item() == math.inf
    x[17] = math.nan
    assert math.isnan(norm_squared([x]).item())
    large = torch.full((1000,), 60000.0).half()
    assert norm_squared([large]).item() == pytest.approx(1000 * 59999.9**2, rel=1e-3)
    assert norm_squared([torch.ones(0), torch.ones(2, 0)]).item() == 0


@pytest.mark.usefixtures("implementation")
def test_long_sums_stay_accurate() -> None:
    assert norm_squared([torch.full((300_000,), 0.1)]).item() == pytest.approx(3000, rel=1e-6)


def test_norm_of_many_tensors(host: Host) -> None:
    tensors = [torch.full((3,), 0.1)] * (norm.MAX_TENSORS + 2)
    assert host.call(norm.launch_norm_squared, tensors).item() == pytest.approx(0.03 * len(tensors), rel=1e-6)
    assert host.launched == ["partial", "partial", "total"]
    # In fp32, 2^26 + 1 rounds to 2^26, so adding the ones one by one would lose them.
    large = [torch.full((1,), 8192.0), *[torch.ones(1)] * 128]
    # There are 16 blocks, each with several tensors.
    assert host.call(norm.launch_norm_squared, large).item() == 2**26 + 128


def test_a_norm_of_no_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        norm_squared([])


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
