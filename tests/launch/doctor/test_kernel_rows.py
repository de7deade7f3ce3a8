"""Tests of the kernel table of `repro doctor --kernels`, with a fake compiler."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from repro import cli
from repro.config import models
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.compile import CompiledProgram, CompileTarget
from repro.kernels.cuda.program import Program, Unavailable
from repro.kernels.families import size_classes
from repro.launch.doctor import kernels

LOG = """ptxas info    : Compiling entry function '{kernel}' for 'sm_80'
    0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 64 bytes smem, 400 bytes cmem[0]
"""


@pytest.fixture(autouse=True)
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        if program.source == "norm":
            raise Unavailable("nonsense")
        spilled = 8 * (program.source == "rope" and target.architecture == "sm_70")
        return CompiledProgram(
            b"code", "".join(LOG.format(kernel=name, spilled=spilled) for name in program.kernels)
        )

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (70, 80, 86, 90, 100))


def test_every_kernel_of_every_size_class_has_a_row() -> None:
    rows = kernels.compile_kernel_rows("sm_70,sm_90")
    compiled = [each for each in size_classes() if each.program.source != "norm"]
    assert len(rows) == 2 * sum(len(each.program.kernels) for each in compiled)
    assert {row.architecture for row in rows} == {"sm_70", "sm_90"}
    assert {row.program.split()[0] for row in rows if row.spilled_bytes} == {"rope"}
    assert all(0 < (part or 0) <= 1 for row in rows for part in (row.occupancy, row.bandwidth))


def test_unknown_gpus_have_no_occupancy_or_bandwidth() -> None:
    known, unknown = (kernels.compile_kernel_rows(each) for each in ("sm_80", "sm_86"))
    assert [(row.kernel, row.registers) for row in unknown] == [(row.kernel, row.registers) for row in known]
    assert {(row.occupancy, row.bandwidth) for row in unknown} == {(None, None)}


def test_every_hidden_size_has_a_norm_kernel() -> None:
    """Both norms have forward and backward kernels for the hidden size of every model."""
    norms = [each for each in size_classes() if each.program.source.startswith("layernorm")]
    for model in map(models.load_model, models.model_names()):
        centred = int(model.norm == "layer")
        found = [
            each
            for each in norms
            if model.hidden in each.sizes and ("CENTRED", centred) in each.program.definitions
        ]
        assert {kernel for each in found for kernel in each.program.kernels} >= {"forward"}, model.name
        assert {kernel for each in found for kernel in each.program.kernels} & {"backward", "gradients"}


def test_kernel_table_is_printed_and_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["doctor", "--kernels", "sm_70,sm_86", "--results", str(tmp_path)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "layernorm.forward half by 8" in text
    assert "40/64/–/–" in text
    assert re.search(r"layernorm\.forward half by 8 centred +\d+ ", text)  # followed by columns
    assert "spilled 8" in text
    assert "bytes in flight can use (Little's law, not measured)" in " ".join(text.split())
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {row["architecture"] for row in rows} == {"sm_70", "sm_86"}
    assert {"kernel", "sizes", "registers", "shared_bytes", "occupancy", "bandwidth"} <= set(rows[0])
