"""Fixtures of the kernel tests: dtypes, tolerances relative to the fp64 reference, and launchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from repro.kernels.cuda import device
from tests.kernels.on_cpu import COMPILER, Host
from tests.kernels.on_gpu import GpuHost

EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def close() -> Callable[..., None]:
    """Return close(actual, expected in fp64, roundings=1): it asserts equality within `roundings` of the dtype."""

    def check(
        actual: Tensor, expected: Tensor, roundings: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        assert actual.shape == expected.shape
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        epsilon = EPSILON[dtype or actual.dtype] * roundings
        torch.testing.assert_close(actual.double(), expected.double(), rtol=epsilon, atol=epsilon * scale)

    return check


@pytest.fixture(scope="session")
def gpu() -> GpuHost:
    """Return the first GPU, with the kernels compiled for it."""
    return GpuHost(device.cuda_launcher(0), "cuda")


@pytest.fixture(scope="session")
def session_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    if COMPILER is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    return Host(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture(params=["", "reversed", pytest.param("gpu", marks=pytest.mark.gpu)])
def host(request: pytest.FixtureRequest) -> Host | GpuHost:
    """Return a launcher of CUDA sources: on the CPU with threads in either order, or on a GPU."""
    found: Host | GpuHost = request.getfixturevalue("gpu" if request.param == "gpu" else "session_host")
    found.reversed = request.param == "reversed"
    found.launched.clear()
    return found
