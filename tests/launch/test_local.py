"""Tests of the resources of this machine and of the files of a local launch, without rank processes."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro import engines
from repro.config import EmulatedNetwork, Experiment, Layout
from repro.config.sizes import RANKS_PER_CORE
from repro.emulate import lab
from repro.launch import local_launch, rank_process
from repro.launch.job import Job
from repro.launch.local_launch import LocalLaunch
from tests.clock import Clock
from tests.training import TINY


def experiment(world: int, system: str = "local", **keys: Any) -> Experiment:
    return Experiment(name="a", model=TINY, layout=Layout(dp=world), system=system, **keys)


def test_missing_resources_of_this_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launch, "count_cuda_devices", lambda: 2)
    monkeypatch.setattr(local_launch, "usable_cores", lambda: 2)
    monkeypatch.setattr(
        engines, "missing_library", lambda engine: "" if engine == "native" else f"engine {engine}"
    )
    monkeypatch.setattr(lab, "missing_requirement", lambda: "namespaces")
    limit, basis = 2 * RANKS_PER_CORE.value, RANKS_PER_CORE.why
    missing = local_launch.missing_resource
    assert missing(experiment(2, "dgx2")) == "2 GPUs of system dgx2"
    assert [missing(experiment(world, "local-gpu")) for world in (2, 3)] == [
        *("", "3 GPUs of system local-gpu, and 2 are visible here")
    ]
    too_many = f"{limit + 1} processes, and this machine runs at most {limit} ({RANKS_PER_CORE.value} a core: {basis})"
    assert [missing(experiment(world)) for world in (limit, limit + 1)] == ["", too_many]
    assert missing(experiment(1, engine="torch")) == "engine torch"
    network = EmulatedNetwork(nodes=2, ranks_per_node=1, between=1e6)
    assert missing(experiment(2, network=network)) == "namespaces"


def test_device_count_respects_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("3, 5,", 2), ("GPU-1,GPU-2,GPU-3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local_launch.count_cuda_devices() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def fail() -> None:
        raise RuntimeError

    driver = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 4, NVMLError=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert local_launch.count_cuda_devices() == 4
    driver.nvmlInit = fail
    assert local_launch.count_cuda_devices() == 0


def test_rank_environment_on_a_machine_and_an_emulated_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local_launch.os, "sched_getaffinity", lambda pid: set(range(8)))
    before = dict(os.environ)
    world = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    variables = {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo", **world}
    assert local_launch.rank_environment(2, 3) == before | variables
    assert local_launch.rank_environment(2, 3, limited=True) == before | variables | {
        "MALLOC_MMAP_THRESHOLD_": "262144"
    }
    assert local_launch._on_node(2, 5) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }


class Ranks(LocalLaunch):
    """Three ranks without processes: the second has ended, the third is stopped."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(local_launch, "scratch_parent", lambda: folder)
        super().__init__(Job(experiments=[experiment(3)]), folder / "logs")
        self.logs.mkdir()
        self.clock, self.dump_poll = Clock(asleep=self._write_stacks).rules(monkeypatch, local_launch), 0
        self.signals: list[int] = []
        for rank in range(3):
            rank_process.error_log_path(self.logs, rank).write_text("a former one (most recent call first)\n")

    def _write_stacks(self) -> None:
        if len(self.clock.slept) == self.dump_poll:
            with rank_process.error_log_path(self.logs, 0).open("a") as file:
                file.write("File x (most recent call first)\n")

    def _signal(self, number: int) -> None:
        self.signals.append(number)

    def poll(self, rank: int) -> int | None:
        return 1 if rank == 1 else None

    def stopped(self, rank: int) -> bool:
        return rank == 2


def test_stack_dump_waits_only_for_running_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.dump_poll = 3
    ranks.dump_stacks()
    assert (ranks.signals, len(ranks.clock.slept)) == ([rank_process.STACKS_SIGNAL], 3)
    ranks.dump_poll, ranks.clock.now = 0, 200.0
    ranks.dump_stacks()
    assert (
        rank_process.STACKS_TIMEOUT_S
        <= ranks.clock.now - 200.0
        < rank_process.STACKS_TIMEOUT_S + 2 * local_launch.STACKS_POLL_INTERVAL_S
    )
    ranks.close(keep_logs=None)
    assert ranks.signals[-1] == signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_reports_and_results_are_read_from_launch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    assert (ranks.report(0), ranks.results(0)) == (None, None)
    (ranks.folder / "rank-0.json").write_text('{"rank": 0, "outcome": "ok"}')
    for rank in range(3):
        assert ranks.results(1) is None
        (ranks.folder / f"finished-1-{rank}.json").write_text(f'{{"rank": {rank}}}')
    assert ranks.report(0) == {"rank": 0, "outcome": "ok"}
    assert ranks.results(1) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert Job.load(ranks.folder / "job.json") == replace(ranks.job)
    rank_process.error_log_path(ranks.logs, 0).write_text(
        "x" * 2 * rank_process.MAX_ERROR_LOG_BYTES + "the end"
    )
    assert ranks.error_text(0) == "x" * (rank_process.MAX_ERROR_LOG_BYTES - 7) + "the end"
    ranks.ask_to_stop()
    assert (ranks.folder / "stop").exists()
    ranks.close(keep_logs=ranks.logs)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert ranks.error_text(7) == ""
