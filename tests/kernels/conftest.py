"""What the kernel tests share: the dtypes, and how far a result may be from the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from repro.kernels.cuda import device
from tests.kernels.on_cpu import COMPILER, Host
from tests.kernels.on_gpu import Elsewhere

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
    """close(actual, expected fp64, roundings=1): equal within so many roundings of the actual's dtype."""

    def check(
        actual: Tensor, expected: Tensor, roundings: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        assert actual.shape == expected.shape
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        epsilon = EPSILON[dtype or actual.dtype] * roundings
        torch.testing.assert_close(actual.double(), expected.double(), rtol=epsilon, atol=epsilon * scale)

    return check


@pytest.fixture(scope="session")
def gpu() -> Elsewhere:
    """The first GPU, with the kernels as they are compiled for it."""
    return Elsewhere(device.cuda_launcher(0), "cuda")


@pytest.fixture(scope="session")
def session_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    if COMPILER is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    return Host(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture(params=["", "reversed", pytest.param("gpu", marks=pytest.mark.gpu)])
def host(request: pytest.FixtureRequest) -> Host | Elsewhere:
    """Runs CUDA sources on the CPU, the threads in either order; and on a GPU where there is one."""
    found: Host | Elsewhere = request.getfixturevalue("gpu" if request.param == "gpu" else "session_host")
    found.reversed = request.param == "reversed"
    found.launched.clear()
    return found
