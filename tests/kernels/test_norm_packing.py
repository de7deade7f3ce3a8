"""Sum of squares and pack/unpack against their references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import norm, norm_squared, pack, packing, unpack
from repro.kernels.norm import _norm_squared


def test_norm_squared(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "CHUNK", 100)
    monkeypatch.setattr(norm, "ROW", 16)
    tensors = [torch.randn(s).to(dtype) for s in ((7, 30), (1,), (0,), (100,), (3, 2, 2))]
    expected = norm.reference([t.double() for t in tensors])
    for function in (norm_squared, _norm_squared):
        actual = function(tensors)
        assert actual.dtype == torch.float32
        assert actual.shape == ()
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_shows(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.randn(70).to(dtype), torch.randn(70).to(dtype)]
    assert norm_squared(tensors).isfinite()
    tensors[1][69] = bad
    assert not norm_squared(tensors).isfinite()


def test_large_fp16_values_do_not_overflow() -> None:
    assert norm_squared([torch.full((1000,), 60000.0).half()]).item() == pytest.approx(
        1000 * 59999.9**2, rel=1e-3
    )


def test_long_sums_stay_accurate() -> None:
    assert norm_squared([torch.full((3_000_000,), 0.1)]).item() == pytest.approx(3e6 * 0.01, rel=5e-6)


def test_empty_tensors_add_nothing() -> None:
    assert norm_squared([torch.ones(0), torch.ones(2, 0)]).item() == 0


def test_empty_list_has_no_device() -> None:
    with pytest.raises(ValueError, match="at least one"):
        norm_squared([])


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    padding=st.integers(0, 5),
    kinds=st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.half])
    ),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_pack_and_unpack(shapes: list, padding: int, kinds: tuple, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randn(shape).to(kinds[0]) for shape in shapes]
    flat = torch.randn(sum(t.numel() for t in tensors) + padding).to(kinds[1])
    expected = flat.clone()
    packing.reference_pack(tensors, expected, scale)
    pack(tensors, flat, scale)
    assert torch.equal(flat, expected)
    back = [torch.empty_like(t) for t in tensors]
    unpack(flat, back, 1 / scale)
    again = [torch.empty_like(t) for t in tensors]
    packing.reference_unpack(flat, again, 1 / scale)
    for a, b, original in zip(back, again, tensors, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.float(), original.float(), rtol=1e-2, atol=1e-2)


def test_a_scaled_product_is_rounded_once() -> None:
    """A gradient in fp16 that a loss scale of 2^20 has brought to its limits comes back in fp32 as it was."""
    scaled = torch.tensor([65504.0, 1.0, 3 * 2.0**-24], dtype=torch.float16)
    flat = torch.zeros(3)
    pack([scaled], flat, 2.0**-20)
    assert torch.equal(flat, scaled.float() * 2.0**-20)
    unpack(flat, [back := torch.zeros_like(scaled)], 2.0**20)
    assert torch.equal(back, scaled)


def test_strided_tensors_and_parameters() -> None:
    tensors = [torch.randn(3, 4).t(), torch.nn.Parameter(torch.randn(5))]
    flat = torch.zeros(17)
    pack(tensors, flat)
    assert torch.equal(flat, torch.cat([tensors[0].reshape(-1), tensors[1].detach()]))
    targets = [torch.zeros(3, 4).t(), torch.nn.Parameter(torch.zeros(5))]
    unpack(flat, targets)
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))
    assert targets[1].is_leaf


def test_buffer_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="at least 4 elements"):
        pack([torch.ones(4)], torch.ones(3))
    with pytest.raises(ValueError, match="1-D buffer"):
        unpack(torch.ones(2, 2), [torch.ones(4)])
