"""Tests of the program of a rank, and of its device settings: GPU environment, algorithms and memory limits."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro import engines
from repro.config import Experiment, Layout, Limits
from repro.config.enums import Phase
from repro.kernels.cuda.program import SOURCES
from repro.launch import rank_process
from repro.launch.job import Job, Stopped
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank import device_settings as settings
from repro.launch.rank import program
from repro.launch.rank.experiment import ExperimentRun
from repro.launch.rank_process import HeartbeatReader
from repro.launch.supervise import watch
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.training import smallest, tiny


class Nan(FloatingPointError):
    """Exception of a target whose training diverged."""


class RankProgram:
    """Rank 1 of a job with two experiments, whose target raises `raises` or returns results."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, memory: int = 0):
        self.folder, self.calls, self.arguments = folder, list[Any](), dict[str, Any]()
        self.raises: BaseException | None = None
        limits, layouts = Limits(memory_bytes=memory), [Layout(dp=2, micro_batch=size) for size in (1, 2)]
        pair = [replace(tiny(one), name=name, limits=limits) for one, name in zip(layouts, "ab", strict=True)]
        Job(experiments=pair).save(folder / "job.json")
        HeartbeatReader(folder / "heartbeat", 2)
        monkeypatch.setitem(sys.modules, "a_target", SimpleNamespace(run=self._run))
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


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankProgram:
    return RankProgram(tmp_path, monkeypatch)


def test_rank_writes_all_results(rank: RankProgram, tmp_path: Path) -> None:
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

    monkeypatch.setattr(settings, "apply_gpu_environment", apply)
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
    rank: RankProgram, capsys: pytest.CaptureFixture[str], raised: BaseException, outcome: str, reason: str
) -> None:
    rank.raises = raised
    assert rank.main() == (program.EXIT_CODES[outcome], {"rank": 1, "outcome": outcome, "reason": reason})
    assert rank.finished() == {"finished-0-1.json": {"early": True}}, "the early result remains"
    assert rank.calls[-1] == "lift"
    assert ("Traceback" in capsys.readouterr().err) == (outcome != "interrupted")


def test_failure_is_reported_before_a_step_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_only_allocator_errors_count_as_out_of_memory() -> None:
    for outcome, errors in (
        ("oom", [MemoryError(), OutOfMemoryError("on the device"), OSError(12, "Cannot allocate memory")]),
        ("oom", [RuntimeError("CUDA out of memory"), RuntimeError("std::bad_alloc")]),
        ("oom", [RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: {TRIED}")]),
        ("oom", [RuntimeError(f"DefaultCPUAllocator: not enough memory: {TRIED}")]),
        ("oom", [RuntimeError(f"could not {verb} a primitive") for verb in ("create", "execute")]),
        ("error", [RuntimeError("could not create a primitive descriptor for a matmul primitive")]),
        ("error", [KeyError("CUDA out of memory"), ValueError("not enough memory"), RuntimeError("shape")]),
        ("error", [IMPORT_WITHOUT_MEMORY]),
        ("diverged", [Nan("std::bad_alloc")]),
    ):
        assert [program.classify_error(error, limited=False) for error in errors] == [outcome] * len(errors)
    assert program.classify_error(IMPORT_WITHOUT_MEMORY, limited=True) == "oom"


NATIVE = tiny(Layout())
HIGH_PRIORITY = {settings.HIGH_PRIORITY_VARIABLE: "1"}
ENGINES = [
    "native",
    pytest.param("torch", marks=pytest.mark.slow),
    *(pytest.param(name, marks=needs(name)) for name in ("deepspeed", "megatron")),
]


def experiment_of(engine: str, **layout: int) -> Experiment:
    return tiny(Layout(**layout), engine=engine)  # type: ignore[arg-type]


def test_record_streams_are_avoided_up_to_torch_2_7() -> None:
    avoided = [
        settings.AVOID_RECORD_STREAMS_VARIABLE in settings.choose_gpu_environment([NATIVE], version)
        for version in ("2.6.0+cu126", "2.7.1", "2.8.0", "2.10.0a0+git1", "unknown")
    ]
    assert avoided == [True, True, False, False, False]


def test_all_experiments_of_a_job_decide_the_gpu_environment() -> None:
    for others, connections, further in (
        ([], "32", HIGH_PRIORITY),
        ([experiment_of("torch", dp=2)], "32", {}),
        ([experiment_of("megatron", dp=2)], "32", {}),
        ([experiment_of("megatron", dp=2), experiment_of("megatron", tp=2)], "1", {}),
        ([tiny(Layout(), deterministic=True)], "32", HIGH_PRIORITY | settings.DETERMINISTIC_ENVIRONMENT),
    ):
        found = settings.choose_gpu_environment([experiment_of("native", tp=2), *others], "2.9.0")
        assert found == {settings.MAX_CONNECTIONS_VARIABLE: connections, **further}
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
    assert deterministic == settings.DETERMINISTIC_ENVIRONMENT


def test_variables_set_by_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    by_user = {settings.HIGH_PRIORITY_VARIABLE: "0", "NCCL_NVLS_ENABLE": "2"}
    monkeypatch.setattr(settings, "versions", lambda packages: {"torch": "2.6.0"})
    monkeypatch.setattr(os, "environ", {**by_user, "PATH": "/bin"})
    settings.apply_gpu_environment([NATIVE, tiny(Layout(), deterministic=True)])
    chosen = {settings.MAX_CONNECTIONS_VARIABLE: "32", settings.AVOID_RECORD_STREAMS_VARIABLE: "1"}
    assert settings.current_gpu_environment() == chosen | settings.DETERMINISTIC_ENVIRONMENT | by_user


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_steps_of_deterministic_experiments_use_deterministic_algorithms(deterministic: bool) -> None:
    seen: list[bool] = []

    def report(step: int, phase: Phase) -> None:
        if phase is Phase.OPTIMIZER:
            seen.append(torch.are_deterministic_algorithms_enabled())

    trained = tiny(Layout(), steps=3, untimed_steps=1, deterministic=deterministic)
    ExperimentRun(trained, meshes.single_rank_mesh(), torch.device("cpu"), report).prelude()
    assert seen == [deterministic]
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_settings_end_with_an_exception() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(RuntimeError, match="warn_only: False"), settings.deterministic_algorithms(True):
            raise RuntimeError(f"warn_only: {torch.is_deterministic_algorithms_warn_only_enabled()}")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory is filled  # type: ignore[attr-defined]


def test_cuda_kernels_use_no_atomic_operations() -> None:
    """An atomic addition would make a sum depend on the order of the blocks."""
    sources = {path.name: path.read_text() for path in SOURCES.glob("**/*.cu*")}
    assert len(sources) > 1
    atomic = re.compile(r"atomic|\bred\.|\batom\.", re.IGNORECASE)
    assert not [name for name, text in sources.items() if atomic.search(text)]


def test_data_segment_size_is_in_bytes() -> None:
    before = settings.data_segment_bytes()
    with mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        grown = settings.data_segment_bytes() - before
    assert 1 << 26 <= grown < (1 << 26) + (1 << 20)
    assert before % mmap.PAGESIZE == 0


@pytest.mark.parametrize(("limit", "stack"), [(resource.RLIM_INFINITY, 2 << 20), (8 << 20, 8 << 20)])
def test_process_group_needs_three_stacks(monkeypatch: pytest.MonkeyPatch, limit: int, stack: int) -> None:
    """A stack has the size of the stack limit, or 2 MiB without a limit (pthread_create(3))."""
    groups = SimpleNamespace(_new_process_group_helper=lambda *arguments: "group")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", groups)
    monkeypatch.setattr(settings.resource, "getrlimit", lambda kind: (limit, limit))
    requested: list[int] = []

    def mmap_once(descriptor: int, size: int, flags: int) -> SimpleNamespace:
        requested.append(size)
        if len(requested) > 1:
            raise OSError(12, "Cannot allocate memory")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(settings.mmap, "mmap", mmap_once)
    settings._check_memory_before_groups()
    assert groups._new_process_group_helper() == "group"
    with pytest.raises(MemoryError, match=f"the threads of a process group need {3 * stack} bytes"):
        groups._new_process_group_helper()
    assert requested == [3 * stack] * 2


IMPORTS = """
import sys
from repro import engines
from repro.config import Layout
from tests.training import tiny, train
engines.import_libraries({engine!r}, "cpu")
before = set(sys.modules)
for layout in Layout(recompute=True), Layout():
    train(tiny(layout, engine={engine!r}, steps=4))
print(*(set(sys.modules) - before))
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_training_imports_no_package_after_the_memory_limit(engine: str) -> None:
    """A limited process cannot distinguish memory of late imports (34 MB of sympy) from memory of the model."""
    command = [sys.executable, "-c", IMPORTS.format(engine=engine)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert [name for name in done.stdout.split() if name.count(".") < 2] == []


LIMIT_MB = {"native": 20, "torch": 40, "megatron": 40, "deepspeed": 40}
"""Memory limit by engine in MB: less than three thread stacks, or than the first group and concurrent imports."""


@pytest.mark.parametrize("engine", ENGINES)
def test_process_group_above_the_memory_limit_is_oom(tmp_path: Path, engine: str) -> None:
    """Without the check of the memory, gloo would abort the process or never return."""
    layout = Layout(dp=2, zero={"megatron": 1}.get(engine, 3), micro_batch=1)
    limits = Limits(timeout_s=60, hang_s=20, memory_bytes=LIMIT_MB[engine] * 10**6)
    experiment = replace(tiny(layout, smallest(layout), engine), limits=limits)
    launched = LocalLaunch(Job(experiments=[experiment]), tmp_path / "logs")
    launched.start()
    ending = watch(launched)
    launched.close(keep_logs=None)
    assert ending.outcome == "oom", ending.reason
    assert "the threads of a process group need" in ending.reason
