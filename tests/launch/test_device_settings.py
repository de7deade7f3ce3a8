"""Tests of a rank's device settings: GPU environment, deterministic algorithms and memory limits."""

from __future__ import annotations

import mmap
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from repro.config import Experiment, Layout, Limits
from repro.config.enums import Phase
from repro.kernels.cuda.program import SOURCES
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank import device_settings
from repro.launch.rank.device_settings import (
    AVOID_RECORD_STREAMS_VARIABLE,
    DETERMINISTIC_ENVIRONMENT,
    HIGH_PRIORITY_VARIABLE,
    MAX_CONNECTIONS_VARIABLE,
    choose_gpu_environment,
    data_segment_bytes,
    deterministic_algorithms,
)
from repro.launch.rank.experiment import ExperimentRun
from repro.launch.supervise import watch
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.training import smallest, tiny

NATIVE = tiny(Layout())
HIGH_PRIORITY = {HIGH_PRIORITY_VARIABLE: "1"}
ENGINES = [
    "native",
    pytest.param("torch", marks=pytest.mark.slow),
    *(pytest.param(name, marks=needs(name)) for name in ("deepspeed", "megatron")),
]


def experiment_of(engine: str, **layout: int) -> Experiment:
    return tiny(Layout(**layout), engine=engine)  # type: ignore[arg-type]


def test_record_streams_are_avoided_up_to_torch_2_7() -> None:
    avoided = [
        AVOID_RECORD_STREAMS_VARIABLE in choose_gpu_environment([NATIVE], version)
        for version in ("2.6.0+cu126", "2.7.1", "2.8.0", "2.10.0a0+git1", "unknown")
    ]
    assert avoided == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("others", "connections", "further"),
    [
        ([], "32", HIGH_PRIORITY),
        ([experiment_of("torch", dp=2)], "32", {}),
        ([experiment_of("megatron", dp=2)], "32", {}),
        ([experiment_of("megatron", dp=2), experiment_of("megatron", tp=2)], "1", {}),
        ([tiny(Layout(), deterministic=True)], "32", HIGH_PRIORITY | DETERMINISTIC_ENVIRONMENT),
    ],
)
def test_all_experiments_of_a_job_decide_the_gpu_environment(
    others: list[Experiment], connections: str, further: dict[str, str]
) -> None:
    found = choose_gpu_environment([experiment_of("native", tp=2), *others], "2.9.0")
    assert found == {MAX_CONNECTIONS_VARIABLE: connections, **further}
    assert DETERMINISTIC_ENVIRONMENT == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}


def test_variables_set_by_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    by_user = {HIGH_PRIORITY_VARIABLE: "0", "NCCL_NVLS_ENABLE": "2"}
    monkeypatch.setattr(device_settings, "versions", lambda packages: {"torch": "2.6.0"})
    monkeypatch.setattr(os, "environ", {**by_user, "PATH": "/bin"})
    device_settings.apply_gpu_environment([NATIVE, tiny(Layout(), deterministic=True)])
    chosen = {MAX_CONNECTIONS_VARIABLE: "32", AVOID_RECORD_STREAMS_VARIABLE: "1"}
    assert device_settings.current_gpu_environment() == {**chosen, **DETERMINISTIC_ENVIRONMENT, **by_user}


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
        with pytest.raises(RuntimeError, match="warn_only: False"), deterministic_algorithms(True):
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
    before = data_segment_bytes()
    with mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        grown = data_segment_bytes() - before
    assert 1 << 26 <= grown < (1 << 26) + (1 << 20)
    assert before % mmap.PAGESIZE == 0


@pytest.mark.parametrize(("limit", "stack"), [(resource.RLIM_INFINITY, 2 << 20), (8 << 20, 8 << 20)])
def test_process_group_needs_three_stacks(monkeypatch: pytest.MonkeyPatch, limit: int, stack: int) -> None:
    """A stack has the size of the stack limit, or 2 MiB without a limit (pthread_create(3))."""
    groups = SimpleNamespace(_new_process_group_helper=lambda *arguments: "group")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", groups)
    monkeypatch.setattr(device_settings.resource, "getrlimit", lambda kind: (limit, limit))
    requested: list[int] = []

    def mmap_once(descriptor: int, size: int, flags: int) -> SimpleNamespace:
        requested.append(size)
        if len(requested) > 1:
            raise OSError(12, "Cannot allocate memory")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(device_settings.mmap, "mmap", mmap_once)
    device_settings._check_memory_before_groups()
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
    """In the first recomputation, torch imports sympy, whose 34 MB would count as memory of the model."""
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
