"""Tests of the CUDA source of the norm on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import norm
from repro.kernels.cuda.program import Unavailable
from tests.kernels.on_cpu import Host, placed

SHAPES = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 8, 31, 4099, 16384, 16391]), st.integers(0, 7)),
    min_size=1,
    max_size=4,
)
KINDS = [torch.float32, torch.float16, torch.bfloat16]
QUICK = settings(max_examples=10)


@QUICK
@given(shapes=SHAPES, mixed=st.booleans())
def test_norm_of_any_sizes_and_alignments(host: Host, shapes: list[tuple[int, int]], mixed: bool) -> None:
    kinds = [KINDS[1 + i % 2] if mixed else torch.float32 for i in range(len(shapes))]
    placements = [placed(torch.randn(n).to(k), o) for (n, o), k in zip(shapes, kinds, strict=True)]
    tensors = [tensor for tensor, _ in placements]
    expected = sum(t.double().square().sum().item() for t in tensors)
    result = host.call(norm.launch_norm_squared, tensors)
    assert result.shape == ()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, rel=1e-6)
    for _, check in placements:
        check()


def test_norm_of_non_finite_values(host: Host) -> None:
    x = torch.ones(5000)
    for value in (float("inf"), float("-inf"), 1e20):
        x[4321] = value
        assert host.call(norm.launch_norm_squared, [x]).item() == math.inf
    x[17] = float("nan")
    assert math.isnan(host.call(norm.launch_norm_squared, [x]).item())


def test_norm_of_many_tensors_and_long_sums(host: Host) -> None:
    tensors = [torch.full((3,), 0.1)] * (norm.MAX_TENSORS + 2)
    assert host.call(norm.launch_norm_squared, tensors).item() == pytest.approx(0.03 * len(tensors), rel=1e-6)
    assert host.launched == ["partial", "partial", "total"]
    assert host.call(norm.launch_norm_squared, [torch.full((300000,), 0.1)]).item() == pytest.approx(
        3000, rel=1e-6
    )
    # In fp32, 2^26 + 1 rounds to 2^26, so adding the ones one by one would lose them.
    large = [torch.full((1,), 8192.0), *[torch.ones(1)] * 128]
    assert (
        host.call(norm.launch_norm_squared, large).item() == 2**26 + 128
    )  # 16 blocks, each with several tensors
    assert host.call(norm.launch_norm_squared, [torch.ones(0)]).item() == 0
    with pytest.raises(Unavailable, match="float64"):
        host.call(norm.launch_norm_squared, [torch.ones(3).double()])
