"""Tests of SwiGLU and of its CUDA source on the CPU, against the fp64 reference."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import glu as binding
from repro.kernels import swiglu
from repro.kernels.cuda.program import Unavailable
from repro.kernels.glu import reference
from tests.kernels.gradients import Close, assert_matches, in_fp64
from tests.kernels.on_cpu import Host, placed


@pytest.mark.parametrize("shape", [(3, 5, 40), (7, 6), (0, 4)])
@pytest.mark.parametrize("plain", [False, True])
def test_swiglu_matches_fp64(shape: tuple[int, ...], plain: bool, dtype: torch.dtype, close: Close) -> None:
    x, grad = (torch.randn(shape) * 3).to(dtype), torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    assert_matches(lambda t: swiglu(t, plain=plain), reference, grad, [x], close)


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], -1)), torch.nn.functional.silu(gate) * up)


def test_gradcheck_and_odd_widths() -> None:
    assert torch.autograd.gradcheck(swiglu, torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True))
    with pytest.raises(ValueError, match=r"swiglu of \[2, 3\] needs an even last dimension"):
        swiglu(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("shape", "kind", "offset"),
    [
        ((5, 3, 80), torch.bfloat16, 0),
        ((1200, 16), torch.float16, 0),
        ((7, 26), torch.float32, 0),
        ((6, 32), torch.float32, 1),
    ],
)
def test_cuda_source_matches_fp64_reference(
    host: Host, shape: tuple[int, ...], kind: torch.dtype, offset: int, close: Close
) -> None:
    x, untouched = placed((4 * torch.randn(shape)).to(kind), offset)
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(kind)
    expected, slope = in_fp64(reference, grad, x)
    close(host.call(binding.launch_swiglu, x), expected)
    close(host.call(binding.launch_swiglu_backward, grad, x), slope)
    untouched()


def test_cuda_source_of_extreme_values_and_empty_tensors(host: Host) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, float("nan"), 1.0, 1.0, 1.0, 1.0]])
    y = host.call(binding.launch_swiglu, x)
    assert y[0, :3].tolist() == [0, 0, 200]
    assert y[0, 3].isnan()
    assert host.call(binding.launch_swiglu, torch.ones(0, 8)).shape == (0, 4)
    with pytest.raises(Unavailable, match="gradient of the dtype of x"):
        host.call(binding.launch_swiglu_backward, torch.ones(2, 4).half(), torch.ones(2, 8))
