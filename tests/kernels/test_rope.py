"""Tests of rotary positions and of their CUDA source on the CPU, against complex numbers in fp64."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import rope as binding
from repro.kernels import rotary
from repro.kernels.rope import reference
from tests.kernels.gradients import Close, assert_matches, in_fp64, saved_for_backward
from tests.kernels.on_cpu import Host, placed

CASES = [
    # Samples, tokens, all heads; rotated heads, head width, rotated width, base.
    (2, 9, 6, (4, 16, 16, 10000.0)),
    (1, 40, 3, (3, 10, 4, 100.0)),
    (3, 5, 2, (1, 32, 16, 500000.0)),
]


@pytest.mark.parametrize(("b", "s", "n", "spec"), CASES)
@pytest.mark.parametrize("plain", [False, True])
def test_rotary_matches_fp64(
    b: int,
    s: int,
    n: int,
    spec: tuple[int, int, int, float],
    plain: bool,
    dtype: torch.dtype,
    close: Close,
) -> None:
    x, grad = (torch.randn(b, s, n * spec[1]).to(dtype) for _ in range(2))
    assert_matches(lambda t: rotary(t, *spec, plain=plain), lambda t: reference(t, *spec), grad, [x], close)


def test_scores_depend_only_on_the_distance() -> None:
    """Property of 2104.09864 sec. 3.1; by hand, pair 0 at position 1 is rotated by one radian."""
    one = torch.randn(1, 1, 8, dtype=torch.float64).expand(1, 12, 8)
    q, k = rotary(one, 1, 8, 8), rotary(one.flip(-1), 1, 8, 8)
    scores = (q @ k.transpose(1, 2))[0]
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    y = rotary(torch.tensor([[[0.0, 0, 0, 0], [1.0, 0, 0, 0]]]), 1, 4, 4)
    torch.testing.assert_close(
        y[0, 1], torch.tensor([1.0, 0, 1.0, 0]) * torch.tensor([0.5403, 0, 0.8415, 0]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("plain", [False, True])
def test_context_parallel_rows_have_their_global_positions(host: Host, plain: bool) -> None:
    """A rank of context parallelism has two chunks of a sequence: rows 1, 2 and rows 7, 8, 9 of 10."""
    x, rows, spec = torch.randn(2, 10, 24), torch.tensor([1, 2, 7, 8, 9]), (2, 8, 4, 100.0)
    expected = reference(x.double(), *spec)[:, rows]
    part = x[:, rows].requires_grad_()
    found = rotary(part, *spec, 1, 2, 4, plain=plain)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (back,) = torch.autograd.grad(found, part, found)
    torch.testing.assert_close(back, part)  # a rotation and its inverse
    from_cuda = host.call(binding.launch_rotary, part.detach(), *spec, False, 1, 2, 4)
    torch.testing.assert_close(from_cuda.double(), expected, rtol=1e-5, atol=1e-5)


def test_rotary_saves_nothing_and_passes_gradcheck() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert not saved_for_backward(lambda: rotary(x, 1, 4, 4))
    assert torch.autograd.gradcheck(lambda t: rotary(t, 1, 4, 2), x)


@pytest.mark.parametrize("spec", [(3, 4, 4), (1, 4, 3), (1, 4, 6), (1, 3, 2)])
def test_mismatched_sizes_are_refused(spec: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"rotary of \[1, 2, 8\] needs"):
        rotary(torch.ones(1, 2, 8), *spec)


@pytest.mark.parametrize(("b", "s", "n", "spec"), CASES)
@pytest.mark.parametrize(
    ("kind", "offset", "inverse"),
    [
        (torch.bfloat16, 0, True),
        (torch.float16, 1, False),
        (torch.float16, 1, True),
        (torch.float32, 0, False),
    ],
)
def test_cuda_source_matches_fp64_reference(
    host: Host,
    b: int,
    s: int,
    n: int,
    spec: tuple[int, int, int, float],
    kind: torch.dtype,
    offset: int,
    inverse: bool,
    close: Close,
) -> None:
    x, untouched = placed(torch.randn(b, s, n * spec[1]).to(kind), offset)
    rotated, rotated_back = in_fp64(lambda t: reference(t, *spec), x, x)
    close(host.call(binding.launch_rotary, x, *spec, inverse), rotated_back if inverse else rotated, 2)
    untouched()


def test_cuda_source_at_large_positions(host: Host) -> None:
    """The tolerance is the rounding of angles of up to 20,000 radians, 2^-24 of the angle."""
    x = torch.randn(1, 20_000, 2)
    found = host.call(binding.launch_rotary, x, 1, 2, 2, 10000.0, False)
    expected = reference(x.double(), 1, 2, 2, 10000.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-3)
    assert host.call(binding.launch_rotary, x[:0], 1, 2, 2, 10000.0, False).shape == (0, 20_000, 2)
