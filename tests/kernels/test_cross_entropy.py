"""Tests of vocabulary-parallel cross-entropy: operators against fp64, and the parallel loss against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import cross_entropy_backward_, cross_entropy_max, cross_entropy_sums
from repro.kernels.cross_entropy import reference_gradient, reference_max, reference_sums
from tests.kernels.gradients import Close


def test_operators_match_fp64_reference(dtype: torch.dtype, close: Close) -> None:
    logits = (torch.randn(9, 31) * 4).to(dtype)
    targets, grad = torch.randint(90, 160, (9,)), torch.randn(9)
    targets[0], targets[1] = 100, 130
    wide = logits.double()
    maximum = cross_entropy_max(logits)
    sums = cross_entropy_sums(logits, maximum, targets, 100)
    assert maximum.dtype == sums.dtype == torch.float32
    assert torch.equal(maximum.double(), reference_max(wide))
    close(sums, reference_sums(wide, reference_max(wide), targets, 100), roundings=4)
    expected = reference_gradient(wide, maximum.double(), sums.double(), targets, 100, grad.double())
    cross_entropy_backward_(logits, maximum, sums, targets, 100, grad)
    assert logits.dtype == dtype
    close(logits, expected)


def parallel_loss(logits: Tensor, targets: Tensor, shards: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the gradient of the mean loss, computed like `shards` ranks."""
    parts = [part.clone() for part in logits.tensor_split(shards, dim=1)]
    starts = [sum(p.shape[1] for p in parts[:i]) for i in range(shards)]
    maximum = torch.stack([cross_entropy_max(p) for p in parts]).amax(0)
    each = [cross_entropy_sums(p, maximum, targets, start) for p, start in zip(parts, starts, strict=True)]
    sums = torch.stack(each).sum(0)
    loss = sums[0].log() - sums[1]
    grad = torch.full_like(maximum, 1 / len(targets))
    for part, start in zip(parts, starts, strict=True):
        cross_entropy_backward_(part, maximum, sums, targets, start, grad)
    return loss, torch.cat(parts, 1)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 20),
    size=st.integers(1, 60),
    shards=st.integers(1, 4),
    chunk=st.integers(1, 300),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    seed=st.integers(0, 1000),
)
def test_parallel_loss_equals_torchs_for_any_sharding(
    rows: int, size: int, shards: int, chunk: int, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = min(shards, size)
    logits = torch.randn(rows, size, generator=generator, dtype=torch.float64) * 5 + shift
    targets = torch.randint(0, size, (rows,), generator=generator)
    leaf = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.mean(), leaf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        actual, actual_gradient = parallel_loss(logits, targets, shards)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(actual_gradient, gradient, rtol=1e-8, atol=1e-8)


def test_padded_columns_and_ignored_rows_have_no_gradient() -> None:
    logits = torch.randn(3, 8)
    logits[:, 6:] = float("-inf")
    targets = torch.tensor([1, -100, 5])
    maximum = cross_entropy_max(logits)
    sums = cross_entropy_sums(logits, maximum, targets, 0)
    loss = sums[0].log() - sums[1]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss[[0, 2]], expected[[0, 2]])
    assert sums[1, 1] == 0
    cross_entropy_backward_(logits, maximum, sums, targets, 0, torch.tensor([1.0, 0.0, 1.0]))
    assert logits.isfinite().all()
    assert (logits[1] == 0).all()
    assert (logits[:, 6:] == 0).all()


def test_mismatched_sizes_are_refused() -> None:
    logits, ones, targets = torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[n, v\]"):
        cross_entropy_max(torch.ones(3))
    with pytest.raises(ValueError, match="one value per row"):
        cross_entropy_sums(logits, torch.ones(3), targets, 0)
    with pytest.raises(ValueError, match=r"sums \[2, 2\]"):
        cross_entropy_backward_(logits, ones, ones, targets, 0, ones)
