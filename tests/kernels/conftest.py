"""Fixtures of the kernel tests: dtypes, launchers of CUDA sources, and implementations of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from repro.kernels.cuda import device
from tests.kernels.bindings import registered_for_cpu
from tests.kernels.on_cpu import COMPILER, Host
from tests.kernels.on_gpu import GpuHost


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def gpu() -> GpuHost:
    """Return the first GPU, with the kernels compiled for it."""
    return GpuHost(device.cuda_launcher(0), "cuda")


@pytest.fixture(scope="session")
def session_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    if COMPILER is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    return Host(tmp_path_factory.mktemp("cuda_on_cpu"))


HOSTS = ["", "reversed", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Host | GpuHost:
    """Return a launcher of CUDA sources: on the CPU with threads in either order, or on a GPU."""
    return _find_host(request)


@pytest.fixture(params=["torch", *HOSTS])
def implementation(request: pytest.FixtureRequest) -> Iterator[Host | GpuHost | None]:
    """Let operators of CPU tensors run torch (None), or CUDA sources with the launcher that the fixture returns."""
    if request.param == "torch":
        yield None
        return
    host = _find_host(request)
    with registered_for_cpu(lambda _, binding: partial(host.call, binding)):
        yield host


def _find_host(request: pytest.FixtureRequest) -> Host | GpuHost:
    found: Host | GpuHost = request.getfixturevalue("gpu" if request.param == "gpu" else "session_host")
    found.reversed = request.param == "reversed"
    found.launched.clear()
    return found
