"""A rank's program in this process: its files, its exit code, and what it calls what was raised."""

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
    """What a target calls diverged."""


def experiment(name: str, layers: int, memory: int) -> Experiment:
    layout = Layout(dp=2, micro_batch=layers)
    return Experiment(name=name, model=TINY, layout=layout, limits=Limits(memory_bytes=memory))


class Ran:
    """One rank of two experiments, whose target raises or returns what a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, memory: int = 0):
        self.folder, self.calls, self.asked = folder, list[Any](), dict[str, Any]()
        self.raises: BaseException | None = None
        self.job = Job(experiments=[experiment("a", 1, memory), experiment("b", 2, memory)])
        self.job.save(folder / "job.json")
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

    def _run(self, job: Job, **asked: Any) -> dict[str, dict[str, Any]]:
        self.asked = {**asked, "folder": job.folder}
        asked["heartbeat"].finished(0, {"early": True})
        if self.raises is not None:
            raise self.raises
        return {e.key: {"of": e.name} for e in job.experiments}

    def main(self, *options: str) -> tuple[int, dict[str, Any]]:
        rank = ["--rank", "1", "--folder", str(self.folder), "--rendezvous", "file:///x", "--parent", "99"]
        code = program.main([str(self.folder / "job.json"), *rank, "--target", "a_target:run", *options])
        return code, json.loads((self.folder / "rank-1.json").read_text())

    def finished(self) -> dict[str, Any]:
        return {path.name: json.loads(path.read_text()) for path in self.folder.glob("finished-*")}


def test_a_rank_hands_in_all_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Ran(tmp_path, monkeypatch)
    assert rank.main() == (0, {"rank": 1, "outcome": "ok", "reason": ""})
    assert rank.finished() == {"finished-0-1.json": {"of": "a"}, "finished-1-1.json": {"of": "b"}}
    del rank.asked["heartbeat"]
    asked = {"rank": 1, "world": 2, "device": "cpu", "rendezvous": "file:///x", "folder": str(tmp_path)}
    assert rank.asked == asked
    register = (rank_process.STACKS_SIGNAL, {"all_threads": True})
    assert rank.calls == [("parent", 99), register, ("limit", 0, "cpu"), "lift"]


def test_under_a_limit_the_engine_is_there_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Ran(tmp_path, monkeypatch, memory=10**6)
    rank.main()
    assert rank.calls[2:] == [("load", "native", "cpu"), ("limit", 10**6, "cpu"), "lift"]


def test_on_a_gpu_its_settings_are_there_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Ran(tmp_path, monkeypatch, memory=10**6)
    monkeypatch.setattr(
        device_settings,
        "apply_gpu_environment",
        lambda experiments: rank.calls.append([e.name for e in experiments]),
    )
    rank.main("--device", "cuda")
    assert rank.calls[2:] == [["a", "b"], ("load", "native", "cuda"), ("limit", 10**6, "cuda"), "lift"]


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
def test_what_is_raised_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    outcome: str,
    reason: str,
) -> None:
    rank = Ran(tmp_path, monkeypatch)
    rank.raises = raised
    assert rank.main() == (program.EXIT_CODES[outcome], {"rank": 1, "outcome": outcome, "reason": reason})
    assert rank.finished() == {"finished-0-1.json": {"early": True}}, "what was handed in early stays"
    assert rank.calls[-1] == "lift"
    assert ("Traceback" in capsys.readouterr().err) == (outcome != "interrupted")


def test_a_failure_is_reported_before_the_failed_step_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that may wait for peers."""
    message: list[bool] = []

    class Held:
        def __del__(self) -> None:
            message.append((tmp_path / "rank-1.json").exists())

    def run(job: Job, **asked: Any) -> dict[str, dict[str, Any]]:
        held = Held()
        raise KeyError(type(held).__name__)

    rank = Ran(tmp_path, monkeypatch)
    monkeypatch.setattr(sys.modules["a_target"], "run", run)
    assert rank.main()[0] == program.EXIT_CODES["error"]
    assert message == [True]


def test_every_outcome_has_an_exit_code_of_its_own() -> None:
    """None is 2, which is argparse's."""
    codes = set(program.EXIT_CODES.values())
    assert len(codes) == len(program.EXIT_CODES)
    assert program.EXIT_CODES["ok"] == 0
    assert not codes & {2, *range(126, 256)}


def test_only_errors_of_allocators_are_of_memory() -> None:
    for text in ("CUDA out of memory", "not enough memory: you tried", "Cannot allocate memory"):
        assert (
            program.classify_error(RuntimeError(text)) == program.classify_error(OSError(12, text)) == "oom"
        )
        assert program.classify_error(KeyError(text)) == "error"
    assert program.classify_error(RuntimeError("shape mismatch")) == "error"
    assert program.classify_error(Nan()) == "diverged"
