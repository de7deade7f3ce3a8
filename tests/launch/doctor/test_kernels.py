"""Tests of the CUDA kernel checks of the doctor: without a GPU, with GPUs, and with failing compilers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.config import ConfigError
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.compile import CompiledProgram, CompileTarget
from repro.kernels.cuda.program import Program, Unavailable
from repro.launch.doctor import Check
from repro.launch.doctor.kernels import check_kernels
from repro.util.extras import install_command

LOG = """ptxas info    : Compiling entry function 'adamw' for 'sm_80'
    {spilled} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, 400 bytes cmem[0]"""


def gpu(capability: tuple[int, int], *, present: bool = True) -> Any:
    """Return a torch module with two GPUs of this compute capability, or without GPUs."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    cuda = SimpleNamespace(
        is_available=lambda: present, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    return SimpleNamespace(cuda=cuda, _C=torch._C)


@pytest.fixture(autouse=True)
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        if program.source == "norm":
            raise Unavailable("norm does not compile: line 7: nonsense")
        return CompiledProgram(b"code", LOG.format(registers=40, spilled=8 * (program.source == "gelu")))

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (70, 80, 90))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_check_without_a_gpu_names_the_compile_command() -> None:
    found = by_name(check_kernels(gpu((0, 0), present=False)))
    assert found["kernels"].state == "yes"
    assert found["NVRTC"].found == "12.9, compiles for sm_70 to sm_90"
    assert found["kernel cache"].found.endswith("cache: 0 programs, 0 B")
    assert "repro doctor --kernels sm_80" in found["CUDA kernels"].enables


def test_each_kernel_family_has_a_compilation_state() -> None:
    found = by_name(check_kernels(gpu((8, 0))))
    assert {f"{name} (sm_80)" for name in families.FAMILIES} <= set(found)
    assert found["adamw (sm_80)"].found == "not compiled yet"
    compiler.compile_cached(families.FAMILIES["adamw"].examples()[0], CompileTarget("sm_80"))
    found = by_name(check_kernels(gpu((8, 0))))
    assert (
        found["adamw (sm_80)"].found
        == "compiled, 1 of 2 programs of common sizes, 40 registers, no registers spilled"
    )
    assert "1 programs" in found["kernel cache"].found


def test_kernels_are_compiled_for_requested_architectures() -> None:
    found = by_name(check_kernels(gpu((0, 0), present=False), "7.0,sm_90"))
    assert found["adamw (sm_70)"].state == found["adamw (sm_90)"].state == "yes"
    assert found["norm (sm_90)"].state == "no"
    assert found["norm (sm_90)"].found == "failed: norm does not compile: line 7: nonsense"
    assert found["bias and GELU (sm_70)"].state == "limited"
    assert "16 bytes spilled" in found["bias and GELU (sm_70)"].found
    all_architectures = by_name(check_kernels(gpu((0, 0), present=False), "all"))
    assert {f"adamw (sm_{a})" for a in (70, 80, 90)} <= set(all_architectures)


def test_unknown_architecture_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--kernels = 'volta': must be architectures such as sm_70"):
        check_kernels(gpu((8, 0)), "volta")


def test_missing_or_too_new_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80))
    found = by_name(check_kernels(gpu((7, 0))))
    assert found["CUDA kernels"].state == "no"
    assert "does not compile for sm_70" in found["CUDA kernels"].found

    def version() -> tuple[int, int]:
        raise Unavailable("no NVRTC (not found)")

    monkeypatch.setattr(compiler, "nvrtc_version", version)
    found = by_name(check_kernels(gpu((8, 0))))
    assert found["CUDA kernels"].found.endswith(f": {install_command(*compiler.COMPILER_PACKAGES)}")
    assert "GPUs run torch's operators instead" in found["CUDA kernels"].enables
    assert by_name(check_kernels(gpu((8, 0), present=False)))["CUDA kernels"].state == "limited"
