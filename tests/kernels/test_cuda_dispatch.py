"""What is done about kernels without a GPU: the cache, the fallback and what is said of it."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.kernels.cuda import cache, dispatch, families
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.compile import Compiled, Target
from repro.kernels.cuda.program import Program, Unavailable

PROGRAM = families.examples()[0]
TARGET = Target("sm_80")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that counts, and a cache of its own."""
    calls: list[str] = []

    def compile(program: Program, target: Target) -> Compiled:
        calls.append(target.architecture)
        return Compiled(b"code\nof " + target.architecture.encode(), "log")

    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile", compile)
    monkeypatch.setattr(compiler, "version", lambda: (12, 9))
    return calls


def test_a_program_is_compiled_once(compilations: list[str]) -> None:
    first = cache.compiled(PROGRAM, TARGET)
    assert cache.compiled(PROGRAM, TARGET) == first == Compiled(b"code\nof sm_80", "log")
    assert compilations == ["sm_80"]
    cache.compiled(PROGRAM, Target("sm_90"))
    assert compilations == ["sm_80", "sm_90"]


def test_another_compiler_or_source_is_another_program(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cache.key(PROGRAM, TARGET)}
    other = Program(PROGRAM.source, PROGRAM.definitions, PROGRAM.arguments, PROGRAM.kernels, 128)
    keys.add(cache.key(other, TARGET))
    monkeypatch.setattr(compiler, "version", lambda: (12, 6))
    keys.add(cache.key(PROGRAM, TARGET))
    monkeypatch.setattr(cache, "headers", lambda: {"number.cuh": "changed"})
    keys.add(cache.key(PROGRAM, TARGET))
    assert len(keys) == 4


def test_a_damaged_file_is_compiled_again(compilations: list[str]) -> None:
    cache.compiled(PROGRAM, TARGET)
    (file,) = cache.folder().iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", b"\xff", b"[]\n", whole[: whole.index(b"\n")]):
        file.write_bytes(damaged)
        assert cache.compiled(PROGRAM, TARGET).code == b"code\nof sm_80"
        assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_said(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match=f"cannot be written.*set {cache.FOLDER}"):
        assert cache.compiled(PROGRAM, TARGET).log == "log"


def _write(folder: Path, content: int) -> None:
    for _ in range(50):
        cache._write(folder / "program", Compiled(bytes([content]) * 20000, "log"))


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not (tmp_path / "program").exists() or cache._read(tmp_path / "program") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_used", {})
    monkeypatch.setattr(dispatch, "device", lambda index: f"gpu {index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv(dispatch.SWITCH, raising=False)


@pytest.mark.usefixtures("forgetful")
def test_the_kernel_runs_where_it_can() -> None:
    call = dispatch.chooser("twice", lambda on, x: (on, x), lambda x: "torch")
    x = torch.ones(1)
    assert call(x) == ("gpu 3", x)
    assert call([x]) == ("gpu 3", [x])
    assert dispatch.used() == {"twice": "cuda"}


@pytest.mark.usefixtures("forgetful")
def test_the_fallback_warns_once_for_each_reason() -> None:
    def binding(on: Any, x: torch.Tensor) -> None:
        raise Unavailable("no NVRTC; pip install")

    call = dispatch.chooser("twice", binding, lambda x: "torch")
    with pytest.warns(RuntimeWarning, match="repro::twice runs torch's operators.*no NVRTC; pip install"):
        assert call(torch.ones(1)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(torch.ones(1)) == "torch"
    assert dispatch.used() == {"twice": "torch: no NVRTC; pip install"}


@pytest.mark.usefixtures("forgetful")
def test_errors_of_a_launch_are_no_reason_to_fall_back() -> None:
    def binding(on: Any, x: torch.Tensor) -> None:
        raise RuntimeError("was not launched")

    with pytest.raises(RuntimeError, match="not launched"):
        dispatch.chooser("twice", binding, lambda x: "torch")(torch.ones(1))


@pytest.mark.usefixtures("forgetful")
def test_the_switch_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.SWITCH, "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.chooser("twice", lambda *_: "cuda", lambda x: "torch")(torch.ones(1)) == "torch"
    assert dispatch.used() == {"twice": "torch: REPRO_KERNELS=torch"}
