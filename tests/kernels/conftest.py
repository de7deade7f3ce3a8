"""Fixtures of the kernel tests: dtypes, launchers of CUDA sources, and implementations of the operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from repro.kernels.cuda import device
from repro.kernels.cuda.program import KernelLauncher, Loaded, Program
from tests.kernels.on_cpu import COMPILER, Host, registered_for_cpu


class GpuHost:
    """Launcher that calls bindings on copies of their tensors on another device, and copies the results back."""

    def __init__(self, launcher: KernelLauncher, device: str):
        self.launcher, self.device = launcher, device
        self.processors = launcher.processors
        self.reversed = False
        self.launched: list[str] = []

    def load(self, program: Program) -> Loaded:
        return _LoggedProgram(self.launcher.load(program), self.launched)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a binding on copies of complete storages, so that tests can check the memory around a tensor."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                return torch.empty_like(tensor, device=self.device)
            if storage.data_ptr() not in copies:
                original = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                copy = torch.empty(original.numel(), dtype=torch.uint8, device=self.device).copy_(original)
                copies[storage.data_ptr()] = original, copy
            geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
            target = copies[storage.data_ptr()][1].untyped_storage()
            moved = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return moved.set_(target, *geometry)  # type: ignore[call-overload]

        result = function(self, *tree_map_only(Tensor, move, arguments))
        for original, copy in copies.values():
            original.copy_(copy)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)


class _LoggedProgram:
    def __init__(self, loaded: Loaded, launched: list[str]):
        self._loaded, self._launched = loaded, launched

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        self._loaded.launch(kernel, blocks, arguments)
        self._launched.append(kernel)


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
