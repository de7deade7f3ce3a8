"""A fake CUDA driver that launches nothing, to test the Python code of a launch without a GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda import device
from repro.kernels.cuda.compile import CompiledProgram

INVALID_CONTEXT, REFUSED = 201, 1


class Driver:
    """Fake of NVIDIA's driver module that records the launches."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_CONTEXT=INVALID_CONTEXT)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.statuses: list[int] = []
        """Status codes of the next launches; all later launches succeed."""
        self.contexts = 0
        self.keep = True

    def cuLaunchKernel(self, *arguments: Any) -> tuple[int]:
        if self.statuses and (status := self.statuses.pop(0)):
            return (status,)
        if self.keep:
            self.launches.append(arguments)
        return (0,)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self.contexts += 1
        return (0,)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (0, name)


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Install the fake driver: CPU tensors are treated as tensors of one H100, and nothing is compiled."""
    driver = Driver()
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (90,))
    monkeypatch.setattr(compiler, "compile_cached", lambda program, target: CompiledProgram(b"", ""))
    monkeypatch.setattr(device, "driver", lambda: driver)
    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setattr(device, "_current_device", lambda: -1)
    monkeypatch.setattr(device, "_current_stream", lambda index: 77)
    return driver


def launch_arguments(launch: tuple[Any, ...], size: int) -> bytes:
    """Return the arguments that a launch passes to the driver; they are valid only during the launch."""
    (first,) = (ctypes.c_void_p * 1).from_address(launch[9])
    return ctypes.string_at(first, size)
