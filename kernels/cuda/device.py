"""Loads compiled programs into the context that torch uses, and launches their kernels on torch's current stream.

A launch allocates nothing on the device and waits for nothing. Arguments are copied by the driver while it queues the
launch, so a CUDA graph that holds it repeats them: the same in every step, but for dropout's, whose key is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from ctypes import addressof, c_char_p
from functools import cache
from typing import Any

import torch

from repro.kernels.cuda import cache as disk
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.program import KernelLauncher, Loaded, Program, Unavailable


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


_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""torch's own, without the check whether CUDA is initialised: there are CUDA tensors already."""

_devices: dict[int, CudaDevice | Unavailable] = {}


def device(index: int) -> KernelLauncher:
    """The launcher of torch's device `cuda:<index>`. Raises Unavailable."""
    found = _devices.get(index)
    return found if type(found) is CudaDevice else _once(_devices, index, lambda: CudaDevice(index))


def _once(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What was made for the key, or why it could not be made: a failure is not tried again at every call."""
    found = known.get(key)
    if found is None:
        try:
            found = make()
        except Unavailable as error:
            found = error
        known[key] = found
    if isinstance(found, Unavailable):
        raise Unavailable(*found.args)
    return found


class CudaDevice:
    """One GPU."""

    def __init__(self, index: int):
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.processors: int = properties.multi_processor_count
        self.target = compiler.target((properties.major, properties.minor))
        self._loaded: dict[Program, Module | Unavailable] = {}

    def load(self, program: Program) -> Loaded:
        found = self._loaded.get(program)
        return found if type(found) is Module else _once(self._loaded, program, lambda: self._module(program))

    def _module(self, program: Program) -> Module:
        return Module(self.index, program, disk.compiled(program, self.target).code)


class Module:
    """A program in the memory of a GPU."""

    def __init__(self, index: int, program: Program, code: bytes):
        api = driver()
        self._index, self._threads = index, program.threads
        self._queue, self._success = api.cuLaunchKernel, api.CUresult.CUDA_SUCCESS
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
        # Every microsecond here is one in which a GPU may wait: no call that could be made once is made here.
        if _current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.launch(kernel, blocks, arguments)
        pointer = c_char_p(arguments)  # an array of one, copied before the driver returns
        shape = (blocks, 1, 1, self._threads, 1, 1, 0, _current_stream(self._index), addressof(pointer), 0)
        status = self._queue(self._kernels[kernel], *shape)[0]
        if status == self._success:
            return None
        return self._again(kernel, status, shape)

    def _again(self, kernel: str, status: Any, shape: tuple[Any, ...]) -> None:
        """A thread in which torch has not used the device yet has no context; other failures are errors."""
        api = driver()
        if status == api.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _checked(api, api.cuCtxSetCurrent(self._context))
            status = self._queue(self._kernels[kernel], *shape)[0]
        if status != self._success:
            raise RuntimeError(
                f"CUDA kernel {kernel} was not launched on cuda:{self._index}: {_text(api, status)}"
            )


def _checked(api: Any, answer: tuple[Any, ...]) -> Any:
    if answer[0] != api.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the CUDA driver answered: {_text(api, answer[0])}")
    return answer[1] if len(answer) > 1 else None


def _text(api: Any, status: Any) -> str:
    described = api.cuGetErrorString(status)[1]
    return described.decode() if isinstance(described, bytes) else str(status)
