"""Launches of CUDA kernels on torch's current stream, with torch's operators as fallback if a kernel is unavailable.

A launch neither allocates device memory nor waits for the device. The driver copies the arguments, so that a CUDA graph
repeats them. Each reason for a fallback is reported once.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable
from ctypes import addressof, c_char_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.program import KernelLauncher, Loaded, Program, Unavailable


@cache
def driver() -> Any:
    """Return the initialised module `cuda.bindings.driver`. Raises `Unavailable` without the module or the driver."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
        status = module.cuInit(0)[0]
    except Exception as error:  # NVIDIA's loader raises its own exception types for a missing library.
        raise Unavailable(f"no CUDA driver API ({error}); {compiler.INSTALL_ADVICE}") from error
    if status != module.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the CUDA driver cannot be used: {_describe_status(module, status)}")
    return module


_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Private functions of torch that return the current device and stream without a check that CUDA is initialised."""

_devices: dict[int, CudaDevice | Unavailable] = {}


def cuda_launcher(index: int) -> KernelLauncher:
    """Return the kernel launcher of torch's device `cuda:<index>`. Raises `Unavailable` without the driver or NVRTC."""
    found = _devices.get(index)
    return found if type(found) is CudaDevice else _make_once(_devices, index, lambda: CudaDevice(index))


def _make_once(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return `known[key]`, which the first call creates by `make()`. Repeat an `Unavailable` error in later calls."""
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
    """Kernel launcher of one GPU, with the CUDA programs that are loaded on it."""

    def __init__(self, index: int):
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.processors: int = properties.multi_processor_count
        self.target = compiler.compile_target((properties.major, properties.minor))
        self._loaded: dict[Program, Module | Unavailable] = {}

    def load(self, program: Program) -> Loaded:
        found = self._loaded.get(program)
        return (
            found
            if type(found) is Module
            else _make_once(self._loaded, program, lambda: self._module(program))
        )

    def _module(self, program: Program) -> Module:
        return Module(self.index, program, compiler.compile_cached(program, self.target).code)


class Module:
    """Compiled program that is loaded on a GPU."""

    def __init__(self, index: int, program: Program, code: bytes):
        api = driver()
        self._index, self._threads = index, program.threads
        self._queue, self._success = api.cuLaunchKernel, api.CUresult.CUDA_SUCCESS
        # Torch uses the primary context of the device, which a new thread must make current.
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
        # The GPU may wait for a launch, so `__init__` makes all driver calls that do not depend on launch arguments.
        if _current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.launch(kernel, blocks, arguments)
        pointer = c_char_p(arguments)  # The driver expects an array of pointers and copies the arguments.
        shape = (blocks, 1, 1, self._threads, 1, 1, 0, _current_stream(self._index), addressof(pointer), 0)
        status = self._queue(self._kernels[kernel], *shape)[0]
        if status == self._success:
            return None
        return self._again(kernel, status, shape)

    def _again(self, kernel: str, status: Any, shape: tuple[Any, ...]) -> None:
        """Repeat a failed kernel launch if the thread lacked the device's context; otherwise raise RuntimeError."""
        api = driver()
        if status == api.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _checked(api, api.cuCtxSetCurrent(self._context))
            status = self._queue(self._kernels[kernel], *shape)[0]
        if status != self._success:
            raise RuntimeError(
                f"CUDA kernel {kernel} was not launched on cuda:{self._index}: {_describe_status(api, status)}"
            )


def _checked(api: Any, answer: tuple[Any, ...]) -> Any:
    if answer[0] != api.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the CUDA driver failed: {_describe_status(api, answer[0])}")
    return answer[1] if len(answer) > 1 else None


def _describe_status(api: Any, status: Any) -> str:
    described = api.cuGetErrorString(status)[1]
    return described.decode() if isinstance(described, bytes) else str(status)


CUDA = "cuda"

_ran: Counter[tuple[str, str]] = Counter()
_reported_reasons: set[str] = set()


def ran() -> Counter[tuple[str, str]]:
    """Return how often each `repro::` operator ran in this process, by (operator, implementation).

    The implementation is `cuda` or `torch: <fallback reason>`. Only calls on CUDA tensors count. The calls of an
    experiment are the difference of two results.
    """
    return _ran.copy()


def cuda_dispatcher(
    name: str, binding: Callable[..., Any], instead: Callable[..., Any]
) -> Callable[..., Any]:
    """Return an operator's function for CUDA tensors, which falls back to `instead` if the kernel is unavailable."""
    done = (name, CUDA)

    def call(*arguments: Any) -> Any:
        try:
            result = binding(cuda_launcher(_device_index(arguments)), *arguments)
        except Unavailable as error:
            _fall_back(name, str(error))
            return instead(*arguments)
        _ran[done] += 1
        return result

    return call


def _fall_back(name: str, why: str) -> None:
    _ran[name, f"torch: {why}"] += 1
    if why in _reported_reasons:
        return
    _reported_reasons.add(why)
    warnings.warn(
        f"repro::{name} runs torch's operators, not its CUDA kernel: {why}", RuntimeWarning, stacklevel=3
    )


def _device_index(arguments: tuple[Any, ...]) -> int:
    """Return the device index of the first tensor among an operator's arguments and in its lists of tensors."""
    for argument in arguments:
        if isinstance(argument, list) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument.get_device()
    raise AssertionError("the arguments of a CUDA operator contain no tensor")
