"""The CUDA sources of the norm and of packing, run on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.kernels.cuda import norm, packing
from repro.kernels.cuda.program import Unavailable
from tests.kernels.on_cpu import Host, placed

SHAPES = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 8, 31, 4099, 16384, 16391]), st.integers(0, 7)),
    min_size=1,
    max_size=4,
)
KINDS = [torch.float32, torch.float16, torch.bfloat16]
QUICK = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(shapes=SHAPES, mixed=st.booleans())
def test_norm_of_any_sizes_and_alignments(host: Host, shapes: list[tuple[int, int]], mixed: bool) -> None:
    kinds = [KINDS[1 + i % 2] if mixed else torch.float32 for i in range(len(shapes))]
    placements = [placed(torch.randn(n).to(k), o) for (n, o), k in zip(shapes, kinds, strict=True)]
    tensors = [tensor for tensor, _ in placements]
    expected = sum(t.double().square().sum().item() for t in tensors)
    result = host.call(norm.norm_squared, tensors)
    assert result.shape == ()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, rel=1e-6)
    for _, check in placements:
        check()


def test_norm_of_what_is_not_finite(host: Host) -> None:
    x = torch.ones(5000)
    for value in (float("inf"), float("-inf"), 1e20):
        x[4321] = value
        assert host.call(norm.norm_squared, [x]).item() == math.inf
    x[17] = float("nan")
    assert math.isnan(host.call(norm.norm_squared, [x]).item())


def test_norm_of_many_equal_numbers_and_tensors(host: Host) -> None:
    tensors = [torch.full((3,), 0.1)] * (norm.TENSORS + 2)
    assert host.call(norm.norm_squared, tensors).item() == pytest.approx(0.03 * len(tensors), rel=1e-6)
    assert host.launched == ["partial", "partial", "total"]
    assert host.call(norm.norm_squared, [torch.full((300000,), 0.1)]).item() == pytest.approx(3000, rel=1e-6)
    assert host.call(norm.norm_squared, [torch.ones(0)]).item() == 0
    with pytest.raises(Unavailable, match="float64"):
        host.call(norm.norm_squared, [torch.ones(3).double()])


@QUICK
@given(
    shapes=SHAPES,
    offset=st.integers(0, 7),
    kinds=st.sampled_from([(0, 0), (0, 1), (1, 0), (2, 2), (1, 2)]),
    padding=st.integers(0, 9),
    scale=st.sampled_from([1.0, 0.3]),
)
def test_pack_and_unpack(
    host: Host, shapes: list[tuple[int, int]], offset: int, kinds: tuple[int, int], padding: int, scale: float
) -> None:
    inside, outside = KINDS[kinds[0]], KINDS[kinds[1]]
    placements = [placed(torch.randn(n).mul(9).to(inside), o) for n, o in shapes]
    tensors = [tensor for tensor, _ in placements]
    count = sum(n for n, _ in shapes)
    flat, whole = placed(torch.full((count + padding,), 3.0).to(outside), offset)
    host.call(packing.pack, tensors, flat, scale)
    scaled = torch.cat(tensors).float() * scale
    assert torch.equal(flat, torch.cat([scaled, torch.full((padding,), 3.0)]).to(outside))
    flat[:count] += 1
    host.call(packing.unpack, flat, tensors, scale)
    assert torch.equal(torch.cat(tensors), (flat[:count].float() * scale).to(inside))
    for check in [whole, *(check for _, check in placements)]:
        check()


def test_packing_in_several_launches_and_what_it_refuses(host: Host) -> None:
    tensors = [torch.randn(i % 5, 2) for i in range(packing.COPIES + 40)]
    tensors[7] = tensors[7].half()
    tensors[9] = torch.randn(2, 3).t()
    flat = torch.zeros(sum(t.numel() for t in tensors))
    host.call(packing.pack, tensors, flat, 1.0)
    assert torch.equal(flat, torch.cat([t.float().reshape(-1) for t in tensors]))
    assert host.launched == ["copies"] * 3
    with pytest.raises(Unavailable, match="contiguous"):
        host.call(packing.unpack, flat, tensors, 1.0)
    with pytest.raises(Unavailable, match="int64"):
        host.call(packing.pack, [torch.ones(2, dtype=torch.int64)], flat, 1.0)


def test_what_is_not_finite_keeps_its_kind(host: Host) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-8, 65504.0, 70000.0, 3e38, 1.5])
    for kind in (torch.float16, torch.bfloat16):
        flat = torch.zeros(9, dtype=kind)
        host.call(packing.pack, [x], flat, 1.0)
        torch.testing.assert_close(flat, x.to(kind), rtol=0, atol=0, equal_nan=True)
