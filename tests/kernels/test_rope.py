"""Tests of positions in rotary embeddings; `test_differentiable.py` compares values and gradients with fp64."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import rotary
from repro.kernels.rope import reference


def test_scores_depend_only_on_the_distance() -> None:
    """Property of 2104.09864 sec. 3.1; by hand, pair 0 at position 1 is rotated by one radian."""
    one = torch.randn(1, 1, 8, dtype=torch.float64).expand(1, 12, 8)
    q, k = rotary(one, 1, 8, 8), rotary(one.flip(-1), 1, 8, 8)
    scores = (q @ k.transpose(1, 2))[0]
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    y = rotary(torch.tensor([[[0.0, 0, 0, 0], [1.0, 0, 0, 0]]]), 1, 4, 4)
    torch.testing.assert_close(y[0, 1], torch.tensor([0.5403, 0, 0.8415, 0]), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_context_parallel_rows_have_their_global_positions() -> None:
    """A rank of context parallelism has two chunks of a sequence: rows 1, 2 and rows 7, 8, 9 of 10."""
    x, rows, spec = torch.randn(2, 10, 24), torch.tensor([1, 2, 7, 8, 9]), (2, 8, 4, 100.0)
    part = x[:, rows].requires_grad_()
    found = rotary(part, *spec, 1, 2, 4)
    expected = reference(x.double(), *spec)[:, rows]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (back,) = torch.autograd.grad(found, part, found)
    torch.testing.assert_close(back, part)  # a rotation and its inverse


@pytest.mark.usefixtures("implementation")
def test_values_at_large_positions_and_of_an_empty_batch() -> None:
    """The tolerance is the rounding of angles of up to 20,000 radians, 2^-24 of the angle."""
    x = torch.randn(1, 20_000, 2)
    expected = reference(x.double(), 1, 2, 2, 10000.0)
    torch.testing.assert_close(rotary(x, 1, 2, 2).double(), expected, rtol=0, atol=5e-3)
    assert rotary(x[:0], 1, 2, 2).shape == reference(x[:0], 1, 2, 2, 10000.0).shape == (0, 20_000, 2)
