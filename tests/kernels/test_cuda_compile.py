"""Tests that every CUDA source compiles for V100 to B200 without register spills, and of a kernel's occupancy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.kernels import families, gelu, layernorm
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.program import Program, Unavailable
from repro.kernels.families import size_classes
from repro.launch.doctor.kernels import (
    GPUS,
    KernelResources,
    occupancy_of,
    parse_resources,
    requested_bytes,
    resident_blocks,
)

try:
    ARCHITECTURES = compiler.supported_architectures()
    MISSING = ""
except Unavailable as error:
    ARCHITECTURES, MISSING = (), str(error)

needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def check(program: Program, architecture: int) -> None:
    if architecture not in ARCHITECTURES:
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not compile for sm_{architecture}")
    compiled = compiler.compile_cuda_program(program, compiler.CompileTarget(f"sm_{architecture}"))
    assert compiled.code.startswith(b"\x7fELF")
    assert not [line for line in compiled.log.splitlines() if "warning" in line and "deprecated" not in line]
    found = parse_resources(compiled.log)
    assert set(found) == set(program.kernels)
    for kernel in found.values():
        assert kernel.spilled_bytes == kernel.stack_bytes == 0
        # A multiprocessor has 65,536 registers, and 512 threads that load 16 bytes each saturate its memory.
        assert kernel.registers <= 128
        assert kernel.registers * program.threads <= 65536
        assert kernel.shared_bytes <= 48 * 1024


@needs_nvrtc
@pytest.mark.parametrize("architecture", [70, 90])
@pytest.mark.parametrize("program", families.example_programs(), ids=lambda program: program.name)
def test_example_programs_compile_without_spills(program: Program, architecture: int) -> None:
    check(program, architecture)


PARTS = 12


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("architecture", [70, 80, 90, 100])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_size_of_every_suite_compiles_without_spills(part: int, architecture: int) -> None:
    requested = [*families.example_programs(), *(each.program for each in size_classes())]
    programs = {program.text: program for program in requested}
    for program in list(programs.values())[part::PARTS]:
        check(program, architecture)


NVRTC_13 = Path(sys.prefix) / "nvrtc13"
PROGRAM_13 = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # or NVIDIA's bindings find the environment's own
from tests.kernels.test_cuda_compile import ARCHITECTURES, check, compiler, families
assert compiler.nvrtc_version()[0] == 13
assert ARCHITECTURES[0] >= 75, "the last NVRTC for V100 is 12"
programs = {(program.source, program.kernels): program for program in reversed(families.example_programs())}
for program in programs.values():
    for architecture in (80, 90, 100):
        check(program, architecture)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (NVRTC_13 / ".installed").exists(),
    reason="NVRTC 13 is not installed: `make test-slow` installs it",
)
def test_every_source_compiles_with_nvrtc_13() -> None:
    """The check runs in a process without another NVRTC."""
    (library,) = NVRTC_13.glob("nvidia/*/lib/libnvrtc.so.13")
    paths = {"PYTHONPATH": f"{NVRTC_13}:{Path(__file__).parents[2]}", "LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-c", PROGRAM_13, str(library)]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_nvrtc
def test_an_empty_log_does_not_corrupt_pythons_bytes() -> None:
    """PTX code has an empty log with only a NUL. A subprocess runs the check, because a fault corrupts the process."""
    script = """
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
target = compiler.CompileTarget(f"compute_{compiler.supported_architectures()[-1]}")
made = compiler.compile_cuda_program(families.example_programs()[0], target)
assert made.log == "", made.log
assert b".version" in made.code, made.code[:80]
print([n for n in range(256) if bytes([n])[0] != n])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr[-2000:]


def test_compile_target_is_the_newest_supported_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80, 90))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    assert compiler.compile_target((8, 0)).architecture == "sm_80"
    assert compiler.compile_target((8, 9)).architecture == "sm_80"
    assert compiler.compile_target((12, 0)).architecture == "compute_90"
    with pytest.raises(
        Unavailable, match=r"NVRTC 13.0 does not compile for sm_70, only from sm_75 on; install"
    ):
        compiler.compile_target((7, 0))


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "architecture", "blocks"),
    [
        (32, 0, 1024, 80, 2),  # 64 warps
        (64, 0, 256, 70, 4),  # 64 x 256 is a quarter of 65,536
        (65, 0, 256, 70, 3),  # 65 x 32 is rounded up to 2304: 7 warps in each quarter
        (128, 0, 512, 90, 1),
        (16, 0, 32, 90, 32),  # limit of blocks
        (16, 48 * 1024, 128, 70, 2),
        (16, 48 * 1024, 128, 80, 3),  # of 164 KiB; each block needs 1 KiB more
        (16, 0, 96, 100, 21),
    ],
)
def test_resident_blocks(registers: int, shared: int, threads: int, architecture: int, blocks: int) -> None:
    assert resident_blocks(KernelResources(registers, 0, 0, shared), threads, GPUS[architecture]) == blocks


def test_bandwidth_by_littles_law() -> None:
    """An H100 multiprocessor needs 5788 bytes in flight; 2048 threads that read one half each request 4096."""
    used = KernelResources(32, 0, 0, 0)
    single, vectorized = gelu.program("half", "half", 1), gelu.program("half", "half", 8)
    assert (requested_bytes(single), requested_bytes(vectorized)) == (2, 16)
    needed = 3352e9 * 400 / 1.755e9 / 132
    assert occupancy_of(single, used, GPUS[90]).bandwidth == pytest.approx(4096 / needed)
    assert occupancy_of(vectorized, used, GPUS[90]).bandwidth == 1.0
    assert occupancy_of(single, used, GPUS[90]).occupancy == 1.0


def test_bandwidth_includes_the_partial_last_wave() -> None:
    """Two blocks per multiprocessor of 512 threads process 160 of 8192 rows at once: 52 waves, the last one partial."""
    backward = layernorm.program("half", "half", 8192, 8, True)
    assert (backward.threads, requested_bytes(backward)) == (512, 32)
    found = occupancy_of(backward, KernelResources(40, 0, 0, 0), GPUS[70])
    assert found.bandwidth == pytest.approx(8192 / 160 / 52)
