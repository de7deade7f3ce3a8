"""Tests of the dispatch of CUDA kernels without a GPU: the cache of programs, fallbacks and their warnings."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.kernels import families
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda import device
from repro.kernels.cuda.compile import CompiledProgram, CompileTarget
from repro.kernels.cuda.program import Program, Unavailable

PROGRAM = families.example_programs()[0]
TARGET = CompileTarget("sm_80")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a fake compiler and an empty cache; return the list of compiled architectures."""
    calls: list[str] = []

    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        calls.append(target.architecture)
        return CompiledProgram(b"code\nof " + target.architecture.encode(), "log")

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    return calls


def test_a_program_is_compiled_once(compilations: list[str]) -> None:
    first = compiler.compile_cached(PROGRAM, TARGET)
    assert compiler.compile_cached(PROGRAM, TARGET) == first == CompiledProgram(b"code\nof sm_80", "log")
    assert compilations == ["sm_80"]
    compiler.compile_cached(PROGRAM, CompileTarget("sm_90"))
    assert compilations == ["sm_80", "sm_90"]


def test_cache_key_depends_on_compiler_and_source(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {compiler.cache_key(PROGRAM, TARGET)}
    other = Program(PROGRAM.source, PROGRAM.definitions, PROGRAM.arguments, PROGRAM.kernels, 128)
    keys.add(compiler.cache_key(other, TARGET))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 6))
    keys.add(compiler.cache_key(PROGRAM, TARGET))
    monkeypatch.setattr(compiler, "headers", lambda: {"number.cuh": "changed"})
    keys.add(compiler.cache_key(PROGRAM, TARGET))
    assert len(keys) == 4


def test_damaged_cache_files_are_compiled_again(compilations: list[str]) -> None:
    compiler.compile_cached(PROGRAM, TARGET)
    (file,) = compiler.cache_folder().iterdir()
    intact = file.read_bytes()
    for damaged in (intact[:-1], b"", b"\xff", b"[]\n", intact[: intact.index(b"\n")]):
        file.write_bytes(damaged)
        assert compiler.compile_cached(PROGRAM, TARGET).code == b"code\nof sm_80"
        assert file.read_bytes() == intact


def test_an_unwritable_cache_folder_is_reported(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match=f"cannot be written.*set {compiler.CACHE_VARIABLE}"):
        assert compiler.compile_cached(PROGRAM, TARGET).log == "log"


def _write(folder: Path, content: int) -> None:
    for _ in range(50):
        compiler._write_cached(folder / "program", CompiledProgram(bytes([content]) * 20000, "log"))


def test_concurrent_writers_leave_one_complete_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not (tmp_path / "program").exists() or compiler._read_cached(tmp_path / "program") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def _compile_repeatedly(answers: Any) -> None:
    for _ in range(20):
        answers.put(compiler.compile_cached(PROGRAM, TARGET).code)


@pytest.mark.usefixtures("compilations")
def test_ranks_with_a_torn_cache_file_get_the_program() -> None:
    compiler.compile_cached(PROGRAM, TARGET)
    (file,) = compiler.cache_folder().iterdir()
    intact = file.read_bytes()
    file.write_bytes(intact[:-3])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_compile_repeatedly, args=(answers,)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert {answers.get() for _ in range(20 * len(ranks))} == {b"code\nof sm_80"}
    for rank in ranks:
        rank.join(250)
    assert [path.read_bytes() for path in compiler.cache_folder().iterdir()] == [intact]


@pytest.fixture
def fresh_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_ran", Counter())
    monkeypatch.setattr(device, "_reported_reasons", set())
    monkeypatch.setattr(device, "cuda_launcher", lambda index: f"gpu {index}")


@pytest.mark.usefixtures("fresh_dispatch")
def test_available_kernels_are_dispatched() -> None:
    call = device.cuda_dispatcher("twice", lambda on, x: (on, x), lambda x: "torch")
    x = torch.ones(1)
    assert call(x) == ("gpu -1", x)
    assert call([x]) == ("gpu -1", [x])
    assert device.ran() == {("twice", "cuda"): 2}


@pytest.mark.usefixtures("fresh_dispatch")
def test_a_fallback_warns_once_per_reason() -> None:
    def binding(on: Any, x: torch.Tensor) -> None:
        raise Unavailable("no NVRTC; pip install")

    calls = [device.cuda_dispatcher(name, binding, lambda x: "torch") for name in ("twice", "thrice")]
    with pytest.warns(RuntimeWarning, match="repro::twice runs torch's operators.*no NVRTC; pip install"):
        assert calls[0](torch.ones(1)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            assert call(torch.ones(1)) == "torch"
    why = "torch: no NVRTC; pip install"
    assert device.ran() == {("twice", why): 2, ("thrice", why): 1}


@pytest.mark.usefixtures("fresh_dispatch")
def test_launch_errors_cause_no_fallback() -> None:
    def binding(on: Any, x: torch.Tensor) -> None:
        raise RuntimeError("was not launched")

    with pytest.raises(RuntimeError, match="not launched"):
        device.cuda_dispatcher("twice", binding, lambda x: "torch")(torch.ones(1))


def test_a_failed_compilation_is_not_repeated(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        attempts.append(program.source)
        raise Unavailable("line 3: nonsense")

    properties = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (80,))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(device, "_devices", {})
    for _ in range(3):
        with pytest.raises(Unavailable, match="line 3: nonsense"):
            device.cuda_launcher(0).load(PROGRAM)
    assert attempts == [PROGRAM.source]


def test_an_unsupported_device_is_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[int] = []

    def properties(index: int) -> Any:
        queries.append(index)
        return SimpleNamespace(major=7, minor=0, multi_processor_count=80)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(device, "_devices", {})
    for _ in range(2):
        with pytest.raises(Unavailable, match="does not compile for sm_70"):
            device.cuda_launcher(0)
    assert queries == [0]
