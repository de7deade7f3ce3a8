"""Tests of the sum of squares against the fp64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from repro.kernels import norm, norm_squared
from repro.kernels.norm import _norm_squared


def test_norm_squared_matches_fp64_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "CPU_CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(norm, "CPU_ROW_ELEMENTS", 16)
    tensors = [torch.randn(s).to(dtype) for s in ((7, 30), (1,), (0,), (100,), (3, 2, 2))]
    expected = norm.reference([t.double() for t in tensors])
    for function in (norm_squared, _norm_squared):
        actual = function(tensors)
        assert actual.dtype == torch.float32
        assert actual.shape == ()
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_give_a_non_finite_norm(bad: float, dtype: torch.dtype) -> None:
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


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        norm_squared([])
