"""Tests of the CUDA sources of causal softmax and cross-entropy on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels import cross_entropy, softmax
from repro.kernels.cuda.program import Unavailable
from tests.kernels.on_cpu import Host, placed

QUICK = settings(max_examples=8)
SCORES = [((2, 3, 24, 24), torch.float16, 0), ((19, 19), torch.float32, 0), ((2, 72, 72), torch.bfloat16, 1)]
"""Shape and dtype of the scores, and their offset from an aligned address, in elements."""


@pytest.mark.parametrize(("shape", "kind", "offset"), SCORES)
def test_softmax_matches_fp64_reference(
    host: Host, shape: tuple[int, ...], kind: torch.dtype, offset: int, close: Callable[..., None]
) -> None:
    scores, untouched = placed((4 * torch.randn(shape)).to(kind), offset)
    scores[..., 5, 3] = float("-inf")
    wide = scores.double().requires_grad_()
    expected = softmax.reference(wide, 0.3)
    y = host.call(softmax.launch_causal_softmax, scores, 0.3)
    close(y, expected)
    assert torch.equal(y.triu(1), torch.zeros_like(y))
    grad = torch.randn(shape).to(kind)
    rounded = y.double()
    product = grad.double() * rounded
    slope = 0.3 * (product - rounded * product.sum(-1, keepdim=True))
    close(host.call(softmax.launch_causal_softmax_backward, grad, y, 0.3), slope)
    untouched()


@QUICK
@given(
    case=st.sampled_from(SCORES),
    matrices=st.integers(1, 5),
    scale=st.floats(0.01, 4),
    seed=st.integers(0, 99),
)
def test_softmax_of_any_number_of_matrices(
    host: Host, case: tuple[tuple[int, ...], torch.dtype, int], matrices: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    (*_, size), kind, offset = case
    scores, untouched = placed(torch.randn(matrices, size, size).to(kind), offset)
    y = host.call(softmax.launch_causal_softmax, scores, scale)
    expected = softmax.reference(scores.double(), scale)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[kind]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    untouched()


def test_softmax_ignores_the_future_and_propagates_nan(host: Host) -> None:
    scores = torch.randn(24, 24)
    expected = softmax.reference(scores, 1.0)
    scores[torch.ones(24, 24).triu(1).bool()] = float("nan")
    y = host.call(softmax.launch_causal_softmax, scores, 1.0)
    torch.testing.assert_close(y, expected)
    scores[9, 4], scores[11, 2] = float("nan"), float("inf")
    y = host.call(softmax.launch_causal_softmax, scores, 1.0)
    bad = torch.zeros(24, dtype=torch.bool)
    bad[[9, 11]] = True
    assert torch.equal(y.isnan().any(1), bad)
    assert y[9, :10].isnan().all()


def test_softmax_refuses_long_rows_and_mixed_dtypes(host: Host) -> None:
    assert host.call(softmax.launch_causal_softmax, torch.ones(0, 8, 8), 1.0).shape == (0, 8, 8)
    with pytest.raises(Unavailable, match="up to 16384 scores, not 20000"):
        softmax.program("half", 20000, 8, True)
    with pytest.raises(Unavailable, match="dtype of the attention weights"):
        host.call(softmax.launch_causal_softmax_backward, torch.ones(2, 2), torch.ones(2, 2).half(), 1.0)
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
def test_cross_entropy_matches_fp64_reference(
    host: Host, rows: int, columns: int, kind: torch.dtype, offset: int, close: Callable[..., None]
) -> None:
    logits, untouched = placed((3 * torch.randn(rows, columns)).to(kind), offset)
    start = 100
    targets = torch.randint(start, start + columns, (rows,))
    targets[0], targets[1] = start - 1, start + columns
    grad = torch.randn(rows)
    maximum = host.call(cross_entropy.launch_cross_entropy_max, logits)
    assert torch.equal(maximum, cross_entropy.reference_max(logits).float())
    maximum += 0.5  # maximum over the columns of other ranks
    precise = (logits.double(), maximum.double())
    sums = host.call(cross_entropy.launch_cross_entropy_sums, logits, maximum, targets, start)
    expected = cross_entropy.reference_sums(*precise, targets, start)
    torch.testing.assert_close(sums.double(), expected, rtol=3e-6, atol=3e-6)
    slope = cross_entropy.reference_gradient(*precise, expected, targets, start, grad.double())
    host.call(cross_entropy.launch_cross_entropy_backward_, logits, maximum, sums, targets, start, grad)
    close(logits, slope, 2)
    untouched()
    assert host.launched == ["maxima", "sums", "gradient"]


@QUICK
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 700),
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_cross_entropy_of_any_size_and_alignment(
    host: Host, rows: int, columns: int, kind: torch.dtype, offset: int, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, untouched = placed((3 * torch.randn(rows, columns)).to(kind), offset)
    before, targets, grad = logits.double(), torch.randint(columns, (rows,)), torch.randn(rows)
    maximum = host.call(cross_entropy.launch_cross_entropy_max, logits)
    sums = host.call(cross_entropy.launch_cross_entropy_sums, logits, maximum, targets, 0)
    host.call(cross_entropy.launch_cross_entropy_backward_, logits, maximum, sums, targets, 0, grad)
    loss = torch.nn.functional.cross_entropy(before.requires_grad_(), targets, reduction="none")
    torch.testing.assert_close((sums[0].log() - sums[1]).double(), loss, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(loss, before, grad.double())
    tolerance = 2e-6 if kind == torch.float32 else 2e-2
    torch.testing.assert_close(logits.double(), slope, rtol=tolerance, atol=tolerance)
    untouched()


def test_cross_entropy_propagates_non_finite_values(host: Host) -> None:
    logits = torch.randn(3, 600)
    logits[1, 599] = float("nan")
    logits[2, 300] = float("inf")
    maximum = host.call(cross_entropy.launch_cross_entropy_max, logits)
    assert maximum[0].isfinite()
    assert maximum[1].isnan()
    assert maximum[2].isinf()
    sums = host.call(
        cross_entropy.launch_cross_entropy_sums, logits, maximum, torch.zeros(3, dtype=torch.int64), 0
    )
    assert torch.equal(sums[0].isnan(), torch.tensor([False, True, True]))


def test_cross_entropy_refuses_other_dtypes_and_strides(host: Host) -> None:
    logits, one = torch.ones(2, 8), torch.ones(2)
    assert host.call(cross_entropy.launch_cross_entropy_max, torch.ones(0, 8)).shape == (0,)
    with pytest.raises(Unavailable, match="int64"):
        host.call(cross_entropy.launch_cross_entropy_sums, logits, one, one.int(), 0)
    with pytest.raises(Unavailable, match="fp32"):
        host.call(cross_entropy.launch_cross_entropy_sums, logits, one.half(), one.long(), 0)
    sums, transposed = torch.ones(2, 2), torch.ones(8, 2).t()
    with pytest.raises(Unavailable, match="overwrites"):
        host.call(cross_entropy.launch_cross_entropy_backward_, transposed, one, sums, one.long(), 0, one)
    assert not host.launched
