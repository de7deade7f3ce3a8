"""Tests of memory limits that are too small for a process group: the ranks report that they ran out of memory."""

from __future__ import annotations

import mmap
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro.config import Layout
from repro.config.experiment import Limits
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from repro.launch.rank import device_settings
from repro.launch.rank.device_settings import data_segment_bytes
from repro.launch.supervise import watch
from tests.engines.needs import needs
from tests.training import smallest, tiny


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
    with pytest.raises(MemoryError, match=f"{3 * stack} bytes for the threads of a process group"):
        groups._new_process_group_helper()
    assert requested == [3 * stack] * 2


LIMIT_MB = {"native": 20, "torch": 40, "megatron": 40, "deepspeed": 100}
"""Memory limit by engine in MB: less than three thread stacks, or than the first group and concurrent imports."""


@pytest.mark.parametrize(
    "engine",
    [
        "native",
        pytest.param("torch", marks=pytest.mark.slow),
        *(pytest.param(name, marks=needs(name)) for name in ("deepspeed", "megatron")),
    ],
)
def test_process_group_above_the_memory_limit_is_oom(tmp_path: Path, engine: str) -> None:
    """Without the check of the memory, gloo would abort the process or never return."""
    layout = Layout(dp=2, zero={"megatron": 1}.get(engine, 3), micro_batch=1)
    experiment = tiny(layout, smallest(layout), engine)
    limits = Limits(timeout_s=60, hang_s=20, memory_bytes=LIMIT_MB[engine] * 10**6)
    launched = LocalLaunch(Job(experiments=[replace(experiment, limits=limits)]), tmp_path / "logs")
    launched.start()
    ending = watch(launched)
    launched.close(keep_logs=None)
    assert ending.outcome == "oom", ending.reason
    # DeepSpeed imports so many modules that an import may reach the limit first.
    assert "for the threads of a process group" in ending.reason or engine == "deepspeed"
