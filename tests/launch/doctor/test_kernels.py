"""Tests of the doctor's checks of CUDA kernels and of the table of `repro doctor --kernels`, with a fake compiler."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro import cli
from repro.config import ConfigError, models
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.compile import CompiledProgram, CompileTarget
from repro.kernels.cuda.program import Program, Unavailable
from repro.kernels.families import size_classes
from repro.launch.doctor import Check, kernels
from repro.util.extras import install_command

LOG = """ptxas info    : Compiling entry function '{kernel}' for 'sm_80'
    {spilled} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 64 bytes smem, 400 bytes cmem[0]
"""


@pytest.fixture(autouse=True)
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile `norm` with an error, and `gelu` with spilled registers for sm_70."""

    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        if program.source == "norm":
            raise Unavailable("norm does not compile: line 7: nonsense")
        spilled = 8 * (program.source == "gelu" and target.architecture == "sm_70")
        log = "".join(LOG.format(kernel=name, spilled=spilled) for name in program.kernels)
        return CompiledProgram(b"code", log)

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (70, 80, 86, 90))


def checks(capability: tuple[int, int] | None, compile_for: str = "") -> dict[str, Check]:
    """Return the checks for two GPUs of this compute capability, or without GPUs, by name."""
    major, minor = capability or (0, 0)
    cuda = SimpleNamespace(
        is_available=lambda: capability is not None,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(major=major, minor=minor),
    )
    fake: Any = SimpleNamespace(cuda=cuda, _C=torch._C)
    return {check.name: check for check in kernels.check_kernels(fake, compile_for)}


def test_check_without_a_gpu_names_the_compile_command() -> None:
    found = checks(None)
    assert found["kernels"].state == "yes"
    assert found["NVRTC"].found == "version 12.9 compiles for GPU architectures sm_70 to sm_90"
    assert found["kernel cache"].found.endswith("cache: 0 programs, 0 B")
    assert "repro doctor --kernels sm_80" in found["CUDA kernels"].enables


def test_each_kernel_family_has_a_compilation_state() -> None:
    found = checks((8, 0))
    assert {f"{name} (sm_80)" for name in families.FAMILIES} <= set(found)
    assert found["adamw (sm_80)"].found == "not compiled yet"
    compiler.compile_cached(families.FAMILIES["adamw"].examples()[0], CompileTarget("sm_80"))
    found = checks((8, 0))
    compiled = "compiled 1 of 2 CUDA programs of common sizes: up to 40 registers per thread"
    assert found["adamw (sm_80)"].found == f"{compiled}, no registers spilled"
    assert "1 programs" in found["kernel cache"].found


def test_kernels_are_compiled_for_requested_architectures() -> None:
    found = checks(None, "7.0,sm_90")
    assert found["adamw (sm_70)"].state == found["adamw (sm_90)"].state == "yes"
    assert found["norm (sm_90)"].state == "no"
    assert found["norm (sm_90)"].found == "failed: norm does not compile: line 7: nonsense"
    assert found["bias and GELU (sm_70)"].state == "limited"
    assert "32 bytes spilled" in found["bias and GELU (sm_70)"].found
    assert found["bias and GELU (sm_90)"].state == "yes"
    every = {name for name in checks(None, "all") if name.startswith("adamw")}
    assert every == {f"adamw (sm_{architecture})" for architecture in (70, 80, 90)}
    with pytest.raises(ConfigError, match="--kernels = 'volta': must be all, or GPU architectures"):
        checks((8, 0), "volta")


def test_missing_or_too_old_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80))
    found = checks((7, 0))["CUDA kernels"]
    assert found.state == "no"
    assert "does not compile for sm_70" in found.found

    def version() -> tuple[int, int]:
        raise Unavailable("no NVRTC (not found)")

    monkeypatch.setattr(compiler, "nvrtc_version", version)
    found = checks((8, 0))["CUDA kernels"]
    assert found.found.endswith(f": {install_command(*compiler.COMPILER_PACKAGES)}")
    assert "training uses torch's operators in place of CUDA kernels" in found.enables
    assert checks(None)["CUDA kernels"].state == "limited"


def test_every_kernel_of_every_size_class_has_a_row() -> None:
    """A GPU that is not in the table of limits, such as sm_86, has no occupancy and bandwidth."""
    rows = kernels.compile_kernel_rows("sm_70,sm_86")
    known, unknown = ([row for row in rows if row.architecture == name] for name in ("sm_70", "sm_86"))
    compiled = [each for each in size_classes() if each.program.source != "norm"]
    assert len(known) == sum(len(each.program.kernels) for each in compiled)
    assert [(row.kernel, row.registers) for row in unknown] == [(row.kernel, row.registers) for row in known]
    assert {row.program.split()[0] for row in rows if row.spilled_bytes} == {"gelu"}
    assert all(0 < (part or 0) <= 1 for row in known for part in (row.occupancy, row.bandwidth))
    assert {(row.occupancy, row.bandwidth) for row in unknown} == {(None, None)}


def test_every_hidden_size_has_a_norm_kernel() -> None:
    """Both norms have forward and backward kernels for the hidden size of every model."""
    norms = [each for each in size_classes() if each.program.source.startswith("layernorm")]
    for model in map(models.load_model, models.model_names()):
        definition = ("CENTRED", int(model.norm == "layer"))
        found = {
            kernel
            for each in norms
            if model.hidden in each.sizes and definition in each.program.definitions
            for kernel in each.program.kernels
        }
        assert "forward" in found, model.name
        assert found & {"backward", "gradients"}, model.name


def test_kernel_table_is_printed_and_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["doctor", "--kernels", "sm_70,sm_86", "--results", str(tmp_path)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "layernorm.forward half by 8" in text
    assert "40/64/–/–" in text
    assert re.search(r"layernorm\.forward half by 8 centred +\d+ ", text)  # followed by columns
    assert "spilled 8" in text
    assert "(Little's law, not measured)" in " ".join(text.split())
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {row["architecture"] for row in rows} == {"sm_70", "sm_86"}
    assert {"kernel", "sizes", "registers", "shared_bytes", "occupancy", "bandwidth"} <= set(rows[0])
