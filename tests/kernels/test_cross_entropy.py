"""Tests of vocabulary-parallel cross-entropy: operators against fp64, and the parallel loss against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import cross_entropy_backward_, cross_entropy_max, cross_entropy_sums
from repro.kernels.cross_entropy import reference_gradient, reference_max, reference_sums
from tests.kernels.gradients import assert_close
from tests.kernels.on_cpu import Host, placed


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "offset"),
    [
        (5, 531, torch.bfloat16, 0),
        (4, 4096, torch.float32, 0),
        (6, 97, torch.float32, 3),
        (3, 5, torch.bfloat16, 1),
        (9, 31, torch.float16, 0),
    ],
)
def test_operators_match_fp64_reference(
    implementation: Host | None, rows: int, columns: int, kind: torch.dtype, offset: int
) -> None:
    logits, untouched = placed((3 * torch.randn(rows, columns)).to(kind), offset)
    start, grad, wide = 100, torch.randn(rows), logits.double()
    targets = torch.randint(start, start + columns, (rows,))
    targets[0], targets[1] = start - 1, start + columns
    maximum = cross_entropy_max(logits)
    assert torch.equal(maximum, reference_max(wide).float())
    maximum += 0.5  # maximum over the columns of other ranks
    sums = cross_entropy_sums(logits, maximum, targets, start)
    assert sums.dtype == torch.float32
    expected = reference_sums(wide, maximum.double(), targets, start)
    assert_close(sums, expected, roundings=2)
    cross_entropy_backward_(logits, maximum, sums, targets, start, grad)
    slope = reference_gradient(wide, maximum.double(), expected, targets, start, grad.double())
    assert_close(logits, slope, roundings=2)
    untouched()
    if implementation is not None:
        assert implementation.launched == ["maxima", "sums", "gradient"]


def parallel_loss(logits: Tensor, targets: Tensor, shards: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the gradient of the mean loss, computed like `shards` ranks."""
    placements = [placed(part, offset) for part in logits.tensor_split(shards, dim=1)]
    parts = [part for part, _ in placements]
    starts = [sum(p.shape[1] for p in parts[:i]) for i in range(shards)]
    maximum = torch.stack([cross_entropy_max(p) for p in parts]).amax(0)
    each = [cross_entropy_sums(p, maximum, targets, start) for p, start in zip(parts, starts, strict=True)]
    sums = torch.stack(each).sum(0)
    loss = sums[0].log() - sums[1]
    grad = torch.full_like(maximum, 1 / len(targets))
    for (part, untouched), start in zip(placements, starts, strict=True):
        cross_entropy_backward_(part, maximum, sums, targets, start, grad)
        untouched()
    return loss, torch.cat(parts, 1)


@pytest.mark.usefixtures("implementation")
@settings(max_examples=20)
@given(
    rows=st.integers(1, 20),
    size=st.integers(1, 60) | st.integers(1, 700),
    shards=st.integers(1, 4),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.integers(0, 7),
    chunk=st.integers(1, 300),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    seed=st.integers(0, 1000),
)
def test_parallel_loss_equals_torchs_for_any_sharding(
    rows: int, size: int, shards: int, kind: torch.dtype, offset: int, chunk: int, shift: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, targets = (torch.randn(rows, size) * 5 + shift).to(kind), torch.randint(0, size, (rows,))
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.mean(), leaf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        actual, actual_gradient = parallel_loss(logits, targets, min(shards, size), offset)
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert_close(actual_gradient, gradient, roundings=2)


@pytest.mark.usefixtures("implementation")
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


@pytest.mark.usefixtures("implementation")
def test_non_finite_values_propagate() -> None:
    logits = torch.randn(3, 600)
    logits[1, 599], logits[2, 300] = float("nan"), float("inf")
    maximum = cross_entropy_max(logits)
    assert [maximum[0].isfinite(), maximum[1].isnan(), maximum[2].isinf()] == [True] * 3
    sums = cross_entropy_sums(logits, maximum, torch.zeros(3, dtype=torch.int64), 0)
    assert sums[0].isnan().tolist() == [False, True, True]
    assert cross_entropy_max(torch.ones(0, 8)).shape == (0,)


def test_mismatched_sizes_are_refused() -> None:
    logits, ones, targets = torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[n, v\]"):
        cross_entropy_max(torch.ones(3))
    with pytest.raises(ValueError, match="one value per row"):
        cross_entropy_sums(logits, torch.ones(3), targets, 0)
    with pytest.raises(ValueError, match=r"sums \[2, 2\]"):
        cross_entropy_backward_(logits, ones, ones, targets, 0, ones)
