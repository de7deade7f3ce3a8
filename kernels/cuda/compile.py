"""Machine code from a program by NVRTC: no toolkit, no host compiler and no GPU is needed.

NVRTC and its Python bindings come as wheels: the extra cuda. NVRTC 12 compiles for V100 (sm_70)
and everything after it, NVRTC 13 no longer for V100.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

from repro.kernels.cuda.program import Program, Unavailable, headers

PACKAGES = ("cuda-bindings<13", "nvidia-cuda-nvrtc-cu12<13")
"""Requirements that compile for every GPU which has kernels."""
INSTALL = "install the extra cuda; `repro doctor` prints the command"
"""Advice without a path of this machine: records keep it."""
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-source-include")


class Target(NamedTuple):
    """What is compiled for."""

    architecture: str
    """`sm_90`: machine code; `compute_90`: intermediate code, which the driver compiles for a newer device."""


class Compiled(NamedTuple):
    """What NVRTC returns."""

    code: bytes
    log: str
    """Warnings, and what the assembler says of registers and spills."""


@cache
def nvrtc() -> Any:
    """NVIDIA's Python module of NVRTC, with the library loaded. Raises Unavailable."""
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        _checked(module, module.nvrtcVersion())
    except Exception as error:  # NVIDIA's loader has errors of its own for a library that is missing
        if isinstance(error, Unavailable):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"no NVRTC ({reason}); {INSTALL}") from error
    return module


@cache
def version() -> tuple[int, int]:
    """Of NVRTC. Raises Unavailable."""
    major, minor = _checked(nvrtc(), nvrtc().nvrtcVersion())
    return major, minor


@cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities times ten that this NVRTC compiles for. Raises Unavailable."""
    return tuple(sorted(_checked(nvrtc(), nvrtc().nvrtcGetSupportedArchs())[0]))


def target(capability: tuple[int, int]) -> Target:
    """What runs on a device: machine code of its generation, or intermediate code of the latest before it.

    Raises Unavailable for a device that is older than all that this NVRTC compiles for.
    """
    own = capability[0] * 10 + capability[1]
    known = [a for a in architectures() if a <= own]
    if not known:
        raise Unavailable(
            f"NVRTC {'.'.join(map(str, version()))} does not compile for sm_{own}, only from "
            f"sm_{architectures()[0]} on; {INSTALL}"
        )
    kind = "sm" if known[-1] // 10 == capability[0] else "compute"
    return Target(f"{kind}_{known[-1]}")


def compile(program: Program, target: Target) -> Compiled:
    """The program for the target. Raises Unavailable with the compiler's message."""
    api, texts = nvrtc(), headers()
    handle = _checked(
        api,
        api.nvrtcCreateProgram(
            program.text.encode(),
            f"{program.source}.cu".encode(),
            len(texts),
            [text.encode() for text in texts.values()],
            [name.encode() for name in texts],
        ),
    )[0]
    try:
        options = [option.encode() for option in options_for(target)]
        status = api.nvrtcCompileProgram(handle, len(options), options)[0]
        log = _read(api, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog, handle).decode(errors="replace")
        if status != api.nvrtcResult.NVRTC_SUCCESS:
            raise Unavailable(
                f"{program.name} does not compile for {target.architecture}: {log.strip() or status}"
            )
        if target.architecture.startswith("sm_"):
            code = _read(api, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN, handle)
        else:
            code = _read(api, api.nvrtcGetPTXSize, api.nvrtcGetPTX, handle)
        return Compiled(code, log.strip("\0\n "))
    finally:
        api.nvrtcDestroyProgram(handle)


def options_for(target: Target) -> tuple[str, ...]:
    """The compiler's options."""
    return (f"--gpu-architecture={target.architecture}", *OPTIONS)


def _checked(api: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0] != api.nvrtcResult.NVRTC_SUCCESS:
        raise Unavailable(f"NVRTC answered {answer[0]}")
    return answer[1:]


def _read(api: Any, size: Any, content: Any, handle: Any) -> bytes:
    # NVIDIA's bindings fill the buffer in place, and Python shares `bytes` of length one: an empty log is one NUL.
    buffer = bytearray(_checked(api, size(handle))[0])
    _checked(api, content(handle, buffer))
    return bytes(buffer)
