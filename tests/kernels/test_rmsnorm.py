"""Tests of RMS norm and of its CUDA source on the CPU, against the fp64 reference."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import layernorm as binding
from repro.kernels import rms_norm
from repro.kernels.cuda.program import Unavailable
from repro.kernels.rmsnorm import reference
from tests.kernels.gradients import Close, assert_matches, in_fp64, with_gradients
from tests.kernels.on_cpu import Host, placed


@pytest.mark.parametrize("shape", [(4, 7, 64), (3, 33), (0, 8)])
@pytest.mark.parametrize("plain", [False, True])
def test_rms_norm_matches_fp64(shape: tuple[int, ...], plain: bool, dtype: torch.dtype, close: Close) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    weight, grad = torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)
    assert_matches(lambda *t: rms_norm(*t, plain=plain), reference, grad, [x, weight], close)


def test_rms_norm_equals_torchs() -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-3), torch.nn.functional.rms_norm(x, (24,), weight, 1e-3)
    )


def test_strided_gradients_and_gradcheck() -> None:
    x, grad = torch.randn(12, 5).t(), torch.randn(12, 5).t()
    weight = torch.randn(12)
    actual = with_gradients(rms_norm, grad, x, weight)
    for a, e in zip(actual, with_gradients(rms_norm, grad.contiguous(), x.contiguous(), weight), strict=True):
        torch.testing.assert_close(a, e)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 5), (5,))]
    assert torch.autograd.gradcheck(rms_norm, leaves)


def test_mismatched_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rms_norm of \[2, 3\] needs a weight of \[3\], not \[4\]"):
        rms_norm(torch.ones(2, 3), torch.ones(4))


@pytest.mark.parametrize(
    ("shape", "kind", "weights", "offset"),
    [
        ((5, 3, 136), torch.bfloat16, torch.bfloat16, 0),
        ((7, 1600), torch.float16, torch.float32, 0),
        ((41, 64), torch.float32, torch.float32, 1),
    ],
)
def test_cuda_source_matches_fp64_reference(
    host: Host,
    shape: tuple[int, ...],
    kind: torch.dtype,
    weights: torch.dtype,
    offset: int,
    close: Close,
) -> None:
    x, untouched = placed((3 * torch.randn(shape) + 5).to(kind), offset)
    grad, weight = torch.randn(shape).to(kind), torch.randn(shape[-1]).to(weights)
    expected, *slopes = in_fp64(lambda *t: reference(*t, eps=0.5), grad, x, weight)
    y, rstd = host.call(binding.launch_rms_norm, x, weight, 0.5)
    close(y, expected, 2)
    close(rstd, (x.double().square().mean(-1, keepdim=True) + 0.5).rsqrt(), 2)
    found = host.call(binding.launch_rms_norm_backward, grad, x, rstd, weight)
    for actual, slope in zip(found, slopes, strict=True):
        close(actual, slope, 8 if actual.dtype == torch.float32 else 2)
    untouched()


def test_cuda_source_of_empty_tensors_and_mixed_dtypes(host: Host) -> None:
    assert host.call(binding.launch_rms_norm, torch.ones(0, 8), torch.ones(8), 1e-5)[1].shape == (0, 1)
    empty = [torch.ones(0, 8)] * 2
    assert host.call(binding.launch_rms_norm_backward, *empty, torch.ones(0, 1), torch.ones(8))[1].shape == (
        8,
    )
    with pytest.raises(Unavailable, match="rms_norm_backward needs a gradient of the dtype of x"):
        host.call(
            binding.launch_rms_norm_backward, empty[0].half(), empty[1], torch.ones(0, 1), torch.ones(8)
        )
    assert not host.launched
