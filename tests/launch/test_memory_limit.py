"""Ranks under a limit of memory that leaves no room for a process group: they run out of memory, and say so."""

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


def test_the_data_segment_is_counted_in_bytes() -> None:
    before = data_segment_bytes()
    with mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        grown = data_segment_bytes() - before
    assert 1 << 26 <= grown < (1 << 26) + (1 << 20)
    assert before % mmap.PAGESIZE == 0


@pytest.mark.parametrize(("limit", "each"), [(resource.RLIM_INFINITY, 2 << 20), (8 << 20, 8 << 20)])
def test_a_group_needs_room_for_three_stacks(monkeypatch: pytest.MonkeyPatch, limit: int, each: int) -> None:
    """As large as the limit on stacks, or two MiB without one (pthread_create(3))."""
    groups = SimpleNamespace(_new_process_group_helper=lambda *arguments: "made")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", groups)
    monkeypatch.setattr(device_settings.resource, "getrlimit", lambda kind: (limit, limit))
    asked: list[int] = []

    def room(descriptor: int, size: int, flags: int) -> SimpleNamespace:
        asked.append(size)
        if len(asked) > 1:
            raise OSError(12, "Cannot allocate memory")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(device_settings.mmap, "mmap", room)
    device_settings._check_memory_before_groups()
    assert groups._new_process_group_helper() == "made"
    with pytest.raises(MemoryError, match=f"{3 * each} bytes for the threads of a process group"):
        groups._new_process_group_helper()
    assert asked == [3 * each] * 2


ROOM = {"native": 20, "torch": 40, "megatron": 40, "deepspeed": 100}
"""MB: less than the stacks of three threads, or those of the ranks' first group and what each imports meanwhile."""


@pytest.mark.parametrize(
    "engine",
    [
        "native",
        pytest.param("torch", marks=pytest.mark.slow),
        *(pytest.param(name, marks=needs(name)) for name in ("deepspeed", "megatron")),
    ],
)
def test_no_room_for_a_group_is_out_of_memory(tmp_path: Path, engine: str) -> None:
    """gloo alone would end the process by SIGABRT, or never return."""
    layout = Layout(dp=2, zero={"megatron": 1}.get(engine, 3), micro_batch=1)
    experiment = tiny(layout, smallest(layout), engine)
    limits = Limits(timeout_s=60, hang_s=20, memory_bytes=ROOM[engine] * 10**6)
    launched = LocalLaunch(Job(experiments=[replace(experiment, limits=limits)]), tmp_path / "logs")
    launched.start()
    ending = watch(launched)
    launched.close(keep_logs=None)
    assert ending.outcome == "oom", ending.reason
    # DeepSpeed imports so much that what meets the limit first may be a module.
    assert "for the threads of a process group" in ending.reason or engine == "deepspeed"
