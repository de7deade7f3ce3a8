"""Loads compiled programs into the context that torch uses, and launches their kernels on torch's current stream.

A launch allocates nothing on the device and waits for nothing, so it may be captured in a CUDA graph. Arguments
are copied by the driver while it queues the launch.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

import torch

from repro.kernels.cuda import cache as disk
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.program import Launcher, Loaded, Program, Unavailable


@cache
def driver() -> Any:
    """NVIDIA's Python module of the driver. Raises Unavailable."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
        status = module.cuInit(0)[0]
    except Exception as error:  # NVIDIA's loader has errors of its own for a library that is missing
        raise Unavailable(f"no CUDA driver API ({error}); {compiler.INSTALL}") from error
    if status != module.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the CUDA driver cannot be used: {_text(module, status)}")
    return module


@cache
def device(index: int) -> Launcher:
    """The launcher of torch's device `cuda:<index>`. Raises Unavailable."""
    return Device(index)


class Device:
    """One GPU."""

    def __init__(self, index: int):
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.processors: int = properties.multi_processor_count
        self.target = compiler.target((properties.major, properties.minor))
        self._loaded: dict[Program, Module] = {}

    def load(self, program: Program) -> Loaded:
        found = self._loaded.get(program)
        if found is None:
            code = disk.compiled(program, self.target).code
            found = self._loaded[program] = Module(self.index, program, code)
        return found


class Module:
    """A program in the memory of a GPU."""

    def __init__(self, index: int, program: Program, code: bytes):
        api = driver()
        self._index, self._threads = index, program.threads
        # torch works in the primary context of a device; a thread that has not used the device yet has none.
        with torch.cuda.device(index):
            self._context = _checked(api, api.cuDevicePrimaryCtxRetain(_checked(api, api.cuDeviceGet(index))))
            _checked(api, api.cuCtxPushCurrent(self._context))
            try:
                self._module = _checked(api, api.cuModuleLoadData(code))
                self._kernels = {
                    name: _checked(api, api.cuModuleGetFunction(self._module, name.encode()))
                    for name in program.kernels
                }
            finally:
                api.cuCtxPopCurrent()

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.launch(kernel, blocks, arguments)
        api = driver()
        held = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        function, stream = self._kernels[kernel], torch._C._cuda_getCurrentRawStream(self._index)
        shape = (blocks, 1, 1, self._threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        status = api.cuLaunchKernel(function, *shape)[0]
        if status == api.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _checked(api, api.cuCtxSetCurrent(self._context))
            status = api.cuLaunchKernel(function, *shape)[0]
        if status != api.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"CUDA kernel {kernel} was not launched on cuda:{self._index}: {_text(api, status)}"
            )
        return None


def _checked(api: Any, answer: tuple[Any, ...]) -> Any:
    if answer[0] != api.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the CUDA driver answered: {_text(api, answer[0])}")
    return answer[1] if len(answer) > 1 else None


def _text(api: Any, status: Any) -> str:
    described = api.cuGetErrorString(status)[1]
    return described.decode() if isinstance(described, bytes) else str(status)
