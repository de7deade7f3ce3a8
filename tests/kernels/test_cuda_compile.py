"""Tests that every CUDA source compiles for V100, A100, H100 and B200 without register spills; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from repro.kernels import families
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.program import Program, Unavailable
from repro.kernels.families import size_classes
from repro.launch.doctor.kernels import parse_resources

try:
    ARCHITECTURES = compiler.supported_architectures()
    MISSING = ""
except Unavailable as error:
    ARCHITECTURES, MISSING = (), str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("architecture", [70, 90])
@pytest.mark.parametrize("program", families.example_programs(), ids=lambda program: program.name)
def test_example_programs_compile_without_spills(program: Program, architecture: int) -> None:
    if architecture not in ARCHITECTURES:
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not compile for sm_{architecture}")
    check(program, compiler.CompileTarget(f"sm_{architecture}"))


def check(program: Program, target: compiler.CompileTarget) -> None:
    compiled = compiler.compile_cuda_program(program, target)
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


PARTS = 12


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [70, 80, 90, 100])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_size_of_every_suite_compiles_without_spills(part: int, architecture: int) -> None:
    if architecture not in ARCHITECTURES:
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not compile for sm_{architecture}")
    requested = [*families.example_programs(), *(each.program for each in size_classes())]
    programs = {program.text: program for program in requested}
    for program in list(programs.values())[part::PARTS]:
        check(program, compiler.CompileTarget(f"sm_{architecture}"))


def test_compiler_errors_are_reported() -> None:
    good = families.example_programs()[0]
    bad = Program(good.source, (*good.definitions, ("float", "nonsense")), good.arguments, good.kernels, 256)
    with pytest.raises(Unavailable, match=r"does not compile for sm_80: (.|\n)*nonsense"):
        compiler.compile_cuda_program(bad, compiler.CompileTarget("sm_80"))


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
