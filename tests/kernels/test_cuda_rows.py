"""The CUDA sources of the causal softmax and of cross-entropy, run on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from repro.kernels import cross_entropy, softmax
from repro.kernels.cuda import cross_entropy as cuda_cross_entropy
from repro.kernels.cuda import softmax as cuda_softmax
from repro.kernels.cuda.program import Unavailable
from tests.kernels.on_cpu import Host, placed

SCORES = [((2, 3, 24, 24), torch.float16, 0), ((19, 19), torch.float32, 0), ((2, 72, 72), torch.bfloat16, 1)]
"""Shape, dtype, and elements by which the scores are off an aligned address."""


@pytest.mark.parametrize(("shape", "kind", "offset"), SCORES)
def test_softmax(
    host: Host, shape: tuple[int, ...], kind: torch.dtype, offset: int, close: Callable[..., None]
) -> None:
    scores, whole = placed((4 * torch.randn(shape)).to(kind), offset)
    scores[..., 5, 3] = float("-inf")
    wide = scores.double().requires_grad_()
    expected = softmax.reference(wide, 0.3)
    y = cuda_softmax.causal_softmax(host, scores, 0.3)
    close(y, expected)
    assert torch.equal(y.triu(1), torch.zeros_like(y))
    grad = torch.randn(shape).to(kind)
    rounded = y.double()
    product = grad.double() * rounded
    slope = 0.3 * (product - rounded * product.sum(-1, keepdim=True))
    close(cuda_softmax.causal_softmax_backward(host, grad, y, 0.3), slope)
    whole()


def test_softmax_reads_no_future_and_keeps_what_is_not_finite(host: Host) -> None:
    scores = torch.randn(24, 24)
    expected = softmax.reference(scores, 1.0)
    scores[torch.ones(24, 24).triu(1).bool()] = float("nan")
    y = cuda_softmax.causal_softmax(host, scores, 1.0)
    torch.testing.assert_close(y, expected)
    scores[9, 4], scores[11, 2] = float("nan"), float("inf")
    y = cuda_softmax.causal_softmax(host, scores, 1.0)
    bad = torch.zeros(24, dtype=torch.bool)
    bad[[9, 11]] = True
    assert torch.equal(y.isnan().any(1), bad)
    assert y[9, :10].isnan().all()


def test_softmax_refuses(host: Host) -> None:
    assert cuda_softmax.causal_softmax(host, torch.ones(0, 8, 8), 1.0).shape == (0, 8, 8)
    with pytest.raises(Unavailable, match="up to 16384 scores, not 20000"):
        cuda_softmax.program("half", 20000, 8, True)
    with pytest.raises(Unavailable, match="dtype of the weights"):
        cuda_softmax.causal_softmax_backward(host, torch.ones(2, 2), torch.ones(2, 2).half(), 1.0)
    assert not host.launched


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "offset"),
    [
        (5, 531, torch.bfloat16, 0),
        (4, 4096, torch.float32, 0),
        (6, 97, torch.float32, 3),
        (3, 5, torch.bfloat16, 1),
    ],
)
def test_cross_entropy(
    host: Host, rows: int, columns: int, kind: torch.dtype, offset: int, close: Callable[..., None]
) -> None:
    logits, whole = placed((3 * torch.randn(rows, columns)).to(kind), offset)
    start = 100
    targets = torch.randint(start, start + columns, (rows,))
    targets[0], targets[1] = start - 1, start + columns
    grad = torch.randn(rows)
    maximum = cuda_cross_entropy.cross_entropy_max(host, logits)
    assert torch.equal(maximum, cross_entropy.reference_max(logits).float())
    maximum += 0.5  # of other ranks' columns
    precise = (logits.double(), maximum.double())
    sums = cuda_cross_entropy.cross_entropy_sums(host, logits, maximum, targets, start)
    expected = cross_entropy.reference_sums(*precise, targets, start)
    torch.testing.assert_close(sums.double(), expected, rtol=3e-6, atol=3e-6)
    slope = cross_entropy.reference_gradient(*precise, expected, targets, start, grad.double())
    cuda_cross_entropy.cross_entropy_backward_(host, logits, maximum, sums, targets, start, grad)
    close(logits, slope, 2)
    whole()
    assert host.launched == ["maxima", "sums", "gradient"]


def test_cross_entropy_of_what_is_not_finite(host: Host) -> None:
    logits = torch.randn(3, 600)
    logits[1, 599] = float("nan")
    logits[2, 300] = float("inf")
    maximum = cuda_cross_entropy.cross_entropy_max(host, logits)
    assert maximum[0].isfinite()
    assert maximum[1].isnan()
    assert maximum[2].isinf()
    sums = cuda_cross_entropy.cross_entropy_sums(host, logits, maximum, torch.zeros(3, dtype=torch.int64), 0)
    assert torch.equal(sums[0].isnan(), torch.tensor([False, True, True]))


def test_cross_entropy_refuses(host: Host) -> None:
    logits, one = torch.ones(2, 8), torch.ones(2)
    assert cuda_cross_entropy.cross_entropy_max(host, torch.ones(0, 8)).shape == (0,)
    with pytest.raises(Unavailable, match="int64"):
        cuda_cross_entropy.cross_entropy_sums(host, logits, one, one.int(), 0)
    with pytest.raises(Unavailable, match="fp32"):
        cuda_cross_entropy.cross_entropy_sums(host, logits, one.half(), one.long(), 0)
    sums, turned = torch.ones(2, 2), torch.ones(8, 2).t()
    with pytest.raises(Unavailable, match="overwrites"):
        cuda_cross_entropy.cross_entropy_backward_(host, turned, one, sums, one.long(), 0, one)
    assert not host.launched
