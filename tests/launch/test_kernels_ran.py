"""Tests that a fallback from a CUDA kernel to torch reaches the record and the terminal."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.config.suites import Entry, Suite
from repro.kernels import gelu
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda import device
from repro.kernels.cuda import program as programs
from repro.kernels.cuda.compile import CompileTarget
from repro.kernels.cuda.program import Program, Unavailable
from repro.launch.progress import Progress
from repro.launch.rank.experiment import ExperimentRun
from repro.launch.recorder import Recorder
from repro.parallel import mesh as meshes
from repro.results.record_parts import RankResult, kernel_fallbacks, kernels_of_ranks
from repro.results.store import Store
from tests.records import lines
from tests.training import tiny

INVALID_SOURCE = 'extern "C" __global__ void gelu(const Arguments a) { nonsense(); }'


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dispatch bias_gelu of CPU tensors as on a GPU, where NVRTC rejects the source."""
    try:
        compiler.nvrtc_version()
    except Unavailable as error:
        pytest.skip(str(error))
    (tmp_path / "wrong.cu").write_text(INVALID_SOURCE)
    monkeypatch.setattr(programs, "SOURCES", tmp_path)
    monkeypatch.setattr(device, "_ran", Counter())
    monkeypatch.setattr(device, "_reported_reasons", set())

    def compile_on(on: Any, *tensors: torch.Tensor) -> None:
        wrong = Program("wrong", (), struct.Struct("P"), ("gelu",), 32)
        compiler.compile_cached(wrong, CompileTarget("sm_80"))

    monkeypatch.setattr(device, "cuda_launcher", lambda index: SimpleNamespace(processors=2))
    call = device.cuda_dispatcher("bias_gelu", compile_on, gelu._forward)
    monkeypatch.setattr(gelu, "forward_operator", call)


def results(kernels: str = "fused") -> dict[str, Any]:
    experiment = tiny(Layout(kernels=kernels), steps=2, untimed_steps=1)
    run = ExperimentRun(experiment, meshes.single_rank_mesh(), torch.device("cpu"), lambda step, phase: None)
    run.prelude()
    run.steps(1)
    return run.result().as_dict()


def recorded(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Record a result twice and return the first record."""
    experiment = tiny(Layout(), steps=2, untimed_steps=1)
    suite = Suite(name="s", file="s.toml", entries=(Entry(experiment=experiment),))
    with Store(folder / "results") as store, Progress(1, 0) as progress:
        recorder = Recorder(suite, store, progress)
        for _ in range(2):
            recorder.outcome(experiment, 1.0, results=[result])
    (record, _) = lines(folder / "results")
    return record


WARNING = "ran torch's operators in place of CUDA kernels for"


def test_fallback_reason_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = {"bias_gelu": ["torch: no compiler"], "adamw_": ["cuda"]}
    result = results()
    assert result["kernels"] == {"every operator": ["torch: on cpu"]}
    record = recorded(tmp_path, result | {"kernels": ran})
    assert record["kernels"] == {"bias_gelu": {"torch: no compiler": 1}, "adamw_": {"cuda": 1}}
    assert capsys.readouterr().err.count(f"warning: tiny {WARNING} bias_gelu: no compiler\n") == 1


@pytest.mark.usefixtures("broken_kernel")
def test_compilation_error_reaches_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RuntimeWarning, match=r"repro::bias_gelu runs torch(.|\n)*nonsense") as caught:
        result = results()
    assert len(caught) == 1
    assert set(result["kernels"]) == {"bias_gelu"}
    assert results("reference")["kernels"] == {"every operator": ["torch: kernels = reference"]}
    record = recorded(tmp_path, result)
    ((implementation, ranks),) = record["kernels"]["bias_gelu"].items()
    assert ranks == 1
    assert implementation.startswith("torch: wrong does not compile for sm_80: wrong.cu(1): error")
    assert "nonsense" in implementation
    message = capsys.readouterr().err
    assert message.count(f"warning: tiny {WARNING} bias_gelu: wrong") == 1
    assert "`repro doctor`" in message


def test_ranks_are_counted_by_kernel_implementation() -> None:
    ranks: list[dict[str, Any]] = [
        {"kernels": {"adamw_": ["cuda"], "bias_gelu": ["cuda"]}},
        {"kernels": {"adamw_": ["cuda", "torch: fp64"], "bias_gelu": ["torch: fp64"]}},
        {},
    ]
    ran = kernels_of_ranks([RankResult.read(rank) for rank in ranks])
    assert ran == {"adamw_": {"cuda": 2, "torch: fp64": 1}, "bias_gelu": {"cuda": 1, "torch: fp64": 1}}
    assert kernel_fallbacks(ran) == {"fp64": ["adamw_", "bias_gelu"]}
    assert kernel_fallbacks({"every operator": {"torch: on cpu": 3}, "bias_gelu": {"cuda": 1}}) == {}
