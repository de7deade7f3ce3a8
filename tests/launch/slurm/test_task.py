"""What a task tells its rank of its place, what it does without a controller, and how a job's end is waited for."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from repro.launch.slurm.allocation import entry, task
from repro.launch.slurm.allocation.task import TaskLaunch

LAUNCH = TaskLaunch(
    address="127.0.0.1",
    port=0,
    token="secret",
    rendezvous=29500,
    per_node=4,
    device="cpu",
    target="x:y",
    limited=False,
    interface="",
    variables={"NCCL_IB_HCA": "mlx5"},
    umask=0o077,
)


def test_a_rank_is_told_its_place_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores; four ranks on the first node and two on the second share them."""
    monkeypatch.setattr(task.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def told(rank: int, launch: TaskLaunch = LAUNCH) -> dict[str, str]:
        return task.environment(launch, rank, 6, "127.0.0.1")

    assert {rank: told(rank)["OMP_NUM_THREADS"] for rank in (0, 3, 4, 5)} == {0: "2", 3: "2", 4: "4", 5: "4"}
    last = told(5)
    assert (last["RANK"], last["WORLD_SIZE"], last["LOCAL_WORLD_SIZE"]) == ("5", "6", "2")
    assert (last["MASTER_ADDR"], last["MASTER_PORT"], last["NCCL_IB_HCA"]) == ("127.0.0.1", "29500", "mlx5")
    assert last["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in last
    assert "MALLOC_MMAP_THRESHOLD_" not in last
    named = told(0, replace(LAUNCH, interface="ib0", limited=True))
    assert (named["GLOO_SOCKET_IFNAME"], named["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")
    assert named["MALLOC_MMAP_THRESHOLD_"] == str(2**18)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert told(0)["OMP_NUM_THREADS"] == "7", "what the user says counts, unless SLURM binds cores"
    for given, threads in (("3", "3"), ("9", "8")):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert told(0)["OMP_NUM_THREADS"] == threads


def test_without_a_controller_a_task_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with socket.socket() as silent:  # has the port, so that nobody else does, and does not listen
        silent.bind(("127.0.0.1", 0))
        replace(LAUNCH, port=silent.getsockname()[1], umask=0o022).save(tmp_path)
        assert task.main([str(tmp_path)]) == 1
    assert "rank 3: no controller at 127.0.0.1" in capsys.readouterr().err


def test_after_sigterm_the_signal_to_requeue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption sends both; `scancel` sends none, and then the job ends all the same."""

    class Stop:
        asked = 0

        @property
        def requeue(self) -> bool:
            self.asked += 1
            return self.asked > 2

    follows, never = Stop(), Stop()
    monkeypatch.setattr(entry, "AGAIN_S", 60.0)
    entry._wait_for(follows)
    assert follows.asked == 3
    monkeypatch.setattr(entry, "AGAIN_S", 0.0)
    entry._wait_for(never)
    assert never.asked == 0
