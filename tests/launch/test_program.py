"""Tests of the program of a rank in this process."""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from repro import engines
from repro.config import Experiment, Layout, Limits
from repro.launch import rank_process
from repro.launch.job import Job, Stopped
from repro.launch.rank import device_settings, program
from repro.launch.rank_process import HeartbeatReader
from tests.training import TINY


class Nan(FloatingPointError):
    """Exception of a target whose training diverged."""


class RankProgram:
    """Rank 1 of a job with two experiments, whose target raises `raises` or returns results."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, memory: int = 0):
        self.folder, self.calls, self.arguments = folder, list[Any](), dict[str, Any]()
        self.raises: BaseException | None = None
        layouts = {"a": Layout(dp=2, micro_batch=1), "b": Layout(dp=2, micro_batch=2)}
        limits = Limits(memory_bytes=memory)
        Job(
            experiments=[
                Experiment(name=name, model=TINY, layout=layout, limits=limits)
                for name, layout in layouts.items()
            ]
        ).save(folder / "job.json")
        HeartbeatReader(folder / "heartbeat", 2)
        target: Any = ModuleType("a_target")
        target.run = self._run
        monkeypatch.setitem(sys.modules, "a_target", target)
        monkeypatch.setattr(program, "die_with_parent", lambda pid: self.calls.append(("parent", pid)))
        monkeypatch.setattr(faulthandler, "enable", lambda: None)
        monkeypatch.setattr(faulthandler, "register", lambda *given, **how: self.calls.append((*given, how)))
        monkeypatch.setattr(engines, "import_libraries", lambda *given: self.calls.append(("load", *given)))
        monkeypatch.setattr(program, "limit_memory", lambda *given: self.calls.append(("limit", *given)))
        monkeypatch.setattr(program, "lift_memory_limit", lambda: self.calls.append("lift"))

    def _run(self, job: Job, **arguments: Any) -> dict[str, dict[str, Any]]:
        self.arguments = {**arguments, "folder": job.folder}
        arguments["heartbeat"].finished(0, {"early": True})
        if self.raises is not None:
            raise self.raises
        return {e.key: {"of": e.name} for e in job.experiments}

    def main(self, *options: str) -> tuple[int, dict[str, Any]]:
        rank = ["--rank", "1", "--folder", str(self.folder), "--rendezvous", "file:///x", "--parent", "99"]
        code = program.main([str(self.folder / "job.json"), *rank, "--target", "a_target:run", *options])
        return code, json.loads((self.folder / "rank-1.json").read_text())

    def finished(self) -> dict[str, Any]:
        return {path.name: json.loads(path.read_text()) for path in self.folder.glob("finished-*")}


def test_rank_writes_all_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankProgram(tmp_path, monkeypatch)
    assert rank.main() == (0, {"rank": 1, "outcome": "ok", "reason": ""})
    assert rank.finished() == {"finished-0-1.json": {"of": "a"}, "finished-1-1.json": {"of": "b"}}
    del rank.arguments["heartbeat"]
    arguments = {"rank": 1, "world": 2, "device": "cpu", "rendezvous": "file:///x", "folder": str(tmp_path)}
    assert rank.arguments == arguments
    register = (rank_process.STACKS_SIGNAL, {"all_threads": True})
    assert rank.calls == [("parent", 99), register, ("limit", 0, "cpu"), "lift"]


@pytest.mark.parametrize(("device", "environment"), [("cpu", []), ("cuda", [["a", "b"]])])
def test_gpu_environment_and_engine_import_precede_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, environment: list[list[str]]
) -> None:
    rank = RankProgram(tmp_path, monkeypatch, memory=10**6)

    def apply(experiments: list[Experiment]) -> None:
        rank.calls.append([experiment.name for experiment in experiments])

    monkeypatch.setattr(device_settings, "apply_gpu_environment", apply)
    rank.main("--device", device)
    assert rank.calls[2:] == [*environment, ("load", "native", device), ("limit", 10**6, device), "lift"]


@pytest.mark.parametrize(
    ("raised", "outcome", "reason"),
    [
        (Stopped("stopped on request after step 3"), "interrupted", "stopped on request after step 3"),
        (Nan("loss is nan"), "diverged", "Nan: loss is nan"),
        (FloatingPointError(), "diverged", "FloatingPointError"),
        (MemoryError("x"), "oom", "MemoryError: x"),
        (KeyError("a  b\n c"), "error", "KeyError: 'a b\\n c'"),
        (ValueError(f"two  words\nand {'x' * 400}"), "error", f"ValueError: two words and {'x' * 386}"),
    ],
)
def test_exceptions_determine_the_reported_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    raised: BaseException, outcome: str, reason: str,
) -> None:  # fmt: skip
    rank = RankProgram(tmp_path, monkeypatch)
    rank.raises = raised
    assert rank.main() == (program.EXIT_CODES[outcome], {"rank": 1, "outcome": outcome, "reason": reason})
    assert rank.finished() == {"finished-0-1.json": {"early": True}}, "the early result remains"
    assert rank.calls[-1] == "lift"
    assert ("Traceback" in capsys.readouterr().err) == (outcome != "interrupted")


def test_failure_is_reported_before_the_step_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the release of the tensors of a step may wait for peers."""
    reported: list[bool] = []

    class Tensors:
        def __del__(self) -> None:
            reported.append((tmp_path / "rank-1.json").exists())

    def run(job: Job, **arguments: Any) -> dict[str, dict[str, Any]]:
        tensors = Tensors()
        raise KeyError(type(tensors).__name__)

    rank = RankProgram(tmp_path, monkeypatch)
    monkeypatch.setattr(sys.modules["a_target"], "run", run)
    assert rank.main()[0] == program.EXIT_CODES["error"]
    assert reported == [True]


class OutOfMemoryError(Exception):
    """An error with the class name of torch.cuda."""


TRIED = "you tried to allocate 4 bytes"
IMPORT_WITHOUT_MEMORY = SystemError("error return without exception set")
"""Error that CPython raises if an import cannot allocate an object."""


@pytest.mark.parametrize(
    ("outcome", "errors"),
    [
        ("oom", [MemoryError(), OutOfMemoryError("on the device"), OSError(12, "Cannot allocate memory")]),
        ("oom", [RuntimeError("CUDA out of memory"), RuntimeError("std::bad_alloc")]),
        ("oom", [RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: {TRIED}")]),
        ("oom", [RuntimeError(f"DefaultCPUAllocator: not enough memory: {TRIED}")]),
        ("oom", [RuntimeError(f"could not {verb} a primitive") for verb in ("create", "execute")]),
        ("error", [RuntimeError("could not create a primitive descriptor for a matmul primitive")]),
        ("error", [KeyError("CUDA out of memory"), ValueError("not enough memory"), RuntimeError("shape")]),
        ("error", [IMPORT_WITHOUT_MEMORY]),
        ("diverged", [Nan("std::bad_alloc")]),
    ],
)
def test_only_allocator_errors_count_as_out_of_memory(outcome: str, errors: list[Exception]) -> None:
    assert [program.classify_error(error, limited=False) for error in errors] == [outcome] * len(errors)
    assert program.classify_error(IMPORT_WITHOUT_MEMORY, limited=True) == "oom"
