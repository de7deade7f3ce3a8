"""Compilation of CUDA programs by NVRTC, and a cache of machine code on disk, which all ranks and nodes share.

NVRTC needs no CUDA toolkit, host compiler or GPU. Cached files are named by a hash of all inputs, and are written under
another name and renamed, so that readers without locks find only complete files.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from repro.kernels.cuda.program import Program, Unavailable, headers
from repro.util.files import replace_file

COMPILER_PACKAGES = ("cuda-bindings<13", "nvidia-cuda-nvrtc-cu12<13")
"""Python packages of NVRTC 12, which supports V100 (sm_70); NVRTC 13 does not support it."""
INSTALL_ADVICE = "install the extra cuda; `repro doctor` prints the command"
"""Advice on the installation of NVRTC for error messages, without paths of the machine, because records contain it."""
COMPILER_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-source-include")


class CompileTarget(NamedTuple):
    """GPU architecture for which NVRTC compiles a CUDA program."""

    architecture: str
    """Name of the GPU architecture: `sm_90` for machine code, or `compute_90` for PTX, which a driver compiles."""


class CompiledProgram(NamedTuple):
    """Result of a compilation by NVRTC."""

    code: bytes
    log: str
    """Compiler warnings, and the assembler's report on registers and register spills."""


@cache
def nvrtc() -> Any:
    """Return the module `cuda.bindings.nvrtc`. Raises `Unavailable` if the module or NVRTC is not installed."""
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        _checked(module, module.nvrtcVersion())
    except Exception as error:  # NVIDIA's loader raises its own exception types for a missing library.
        if isinstance(error, Unavailable):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"no NVRTC ({reason}); {INSTALL_ADVICE}") from error
    return module


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of NVRTC. Raises `Unavailable` without NVRTC."""
    major, minor = _checked(nvrtc(), nvrtc().nvrtcVersion())
    return major, minor


@cache
def supported_architectures() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC supports, times ten. Raises `Unavailable` without NVRTC."""
    return tuple(sorted(_checked(nvrtc(), nvrtc().nvrtcGetSupportedArchs())[0]))


def compile_target(capability: tuple[int, int]) -> CompileTarget:
    """Return the target for a GPU: machine code of its major architecture, or PTX of an earlier architecture.

    Raises `Unavailable` if NVRTC supports only newer GPUs.
    """
    own = capability[0] * 10 + capability[1]
    known = [a for a in supported_architectures() if a <= own]
    if not known:
        raise Unavailable(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not compile for sm_{own}, only from "
            f"sm_{supported_architectures()[0]} on; {INSTALL_ADVICE}"
        )
    kind = "sm" if known[-1] // 10 == capability[0] else "compute"
    return CompileTarget(f"{kind}_{known[-1]}")


def compile_cuda_program(program: Program, target: CompileTarget) -> CompiledProgram:
    """Compile a program for a target. Raises `Unavailable` with the compiler's log if the compilation fails."""
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
        options = [option.encode() for option in compiler_options(target)]
        status = api.nvrtcCompileProgram(handle, len(options), options)[0]
        log = _read_output(api, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog, handle).decode(
            errors="replace"
        )
        if status != api.nvrtcResult.NVRTC_SUCCESS:
            raise Unavailable(
                f"{program.name} does not compile for {target.architecture}: {log.strip() or status}"
            )
        if target.architecture.startswith("sm_"):
            code = _read_output(api, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN, handle)
        else:
            code = _read_output(api, api.nvrtcGetPTXSize, api.nvrtcGetPTX, handle)
        return CompiledProgram(code, log.strip("\0\n "))
    finally:
        api.nvrtcDestroyProgram(handle)


def compiler_options(target: CompileTarget) -> tuple[str, ...]:
    """Return the command line options of NVRTC for the GPU architecture of a target."""
    return (f"--gpu-architecture={target.architecture}", *COMPILER_OPTIONS)


def _checked(api: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0] != api.nvrtcResult.NVRTC_SUCCESS:
        raise Unavailable(f"NVRTC failed with the status {answer[0]}")
    return answer[1:]


def _read_output(api: Any, size: Any, content: Any, handle: Any) -> bytes:
    # NVIDIA's bindings write into the buffer, which must be a bytearray because Python shares `bytes` of length one.
    buffer = bytearray(_checked(api, size(handle))[0])
    _checked(api, content(handle, buffer))
    return bytes(buffer)


CACHE_VARIABLE = "REPRO_KERNEL_CACHE"
"""Environment variable that selects another folder for compiled programs."""


def cache_folder() -> Path:
    """Return the folder of compiled programs: $REPRO_KERNEL_CACHE, or `repro/kernels` in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    # Without a home folder, the path is `/~/.cache`, which is not writable.
    own = os.path.join("/", os.path.expanduser("~/.cache"))
    return Path(os.environ.get("XDG_CACHE_HOME") or own).expanduser() / "repro" / "kernels"


def cache_key(program: Program, target: CompileTarget) -> str:
    """Return the hash of all inputs of a compilation: source, macros, headers, options and NVRTC's version."""
    parts = [program.text, headers(), compiler_options(target), nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def cache_contents() -> tuple[int, int]:
    """Return the number of compiled programs in the cache folder, for all architectures, and the sum of their bytes."""
    try:
        sizes = [
            entry.stat().st_size for entry in os.scandir(cache_folder()) if not entry.name.startswith(".")
        ]
    except OSError:
        return 0, 0
    return len(sizes), sum(sizes)


def cached_program(program: Program, target: CompileTarget) -> CompiledProgram | None:
    """Return the compiled CUDA program in the disk cache; None if missing. Raises `Unavailable` without NVRTC."""
    return _read_cached(_cache_path(program, target))


def _cache_path(program: Program, target: CompileTarget) -> Path:
    return cache_folder() / f"{program.source}-{target.architecture}-{cache_key(program, target)}"


def compile_cached(program: Program, target: CompileTarget) -> CompiledProgram:
    """Return the compiled CUDA program from the disk cache, or compile and cache it. May raise `Unavailable`."""
    path = _cache_path(program, target)
    found = _read_cached(path)
    if found is None:
        found = compile_cuda_program(program, target)
        try:
            _write_cached(path, found)
        except OSError as error:
            warnings.warn(
                f"every process compiles the kernels again, because {path.parent} cannot be written "
                f"({error.strerror}); set {CACHE_VARIABLE} to a writable folder",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _read_cached(path: Path) -> CompiledProgram | None:
    """Return the compiled CUDA program in a file of the cache; None for a missing or damaged file."""
    try:
        first, _, code = path.read_bytes().partition(b"\n")
        about = json.loads(first)
        is_intact = about["sha256"] == hashlib.sha256(code).hexdigest()
        return CompiledProgram(code, about["log"]) if is_intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cached(path: Path, content: CompiledProgram) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"sha256": hashlib.sha256(content.code).hexdigest(), "log": content.log}
    replace_file(path, json.dumps(about).encode() + b"\n" + content.code)
