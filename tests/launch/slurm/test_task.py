"""Tests of the SLURM task of a rank: environment, process and messages of the rank, and failed starts."""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.launch import rank_process
from repro.launch.job import Job
from repro.launch.rank_process import HeartbeatWriter
from repro.launch.slurm.allocation import task
from repro.launch.slurm.allocation.task import POSITION_INTERVAL_S, RankProcess, TaskLaunch
from tests.training import TINY

EXPERIMENTS = [Experiment(name=name, model=TINY, layout=Layout(dp=2)) for name in "abcd"]


class Rank(RankProcess):
    """Rank 1 of two started ranks, whose process is imitated and whose shared memory is a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.logs, self.work, self.signals = folder / "logs", folder / "work", []
        for created in (self.logs, self.work):
            created.mkdir()
        Job(experiments=EXPERIMENTS).save(self.logs / task.JOB_FILE)
        self.child = MagicMock(spec=subprocess.Popen, pid=4711)
        self.exit(None)
        self.oom_kills, self.halted = 3, False
        monkeypatch.setattr(task, "scratch_parent", lambda: self.work)
        monkeypatch.setattr(task, "count_kernel_oom_kills", lambda: self.oom_kills)
        imitated = SimpleNamespace(**{**vars(subprocess), "Popen": lambda *_, **how: self.child})
        monkeypatch.setattr(rank_process, "subprocess", imitated)
        monkeypatch.setattr(task.os, "killpg", lambda pid, number: self.signals.append((pid, number)))
        monkeypatch.setattr(task.rank_process, "is_stopped", lambda pid: self.halted)
        super().__init__("tcp://n1:5", "cpu", "x:y", self.logs, 1, 2)
        self.start({"RANK": "1"})

    @property
    def folder(self) -> Path:
        """Return the folder of the rank's files on its node."""
        (found,) = self.work.iterdir()
        return found

    def exit(self, code: int | None) -> None:
        """Set the exit code of the rank's process; None while it runs."""
        self.child.poll.return_value = code

    def messages(self, now: float) -> list[dict[str, Any]]:
        return list(self.news(now))


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with closing(Rank(tmp_path, monkeypatch)) as created:
        yield created


def test_position_is_sent_periodically_and_for_new_experiments(rank: Rank) -> None:
    heartbeat = HeartbeatWriter(rank.folder / "heartbeat", 1)
    before_next = POSITION_INTERVAL_S - 0.125
    assert rank.messages(50.0) == [], "no heartbeat was written"
    assert rank.messages(50.0 + before_next) == []
    heartbeat.phase(0, 3, Phase.FORWARD)
    (position,) = rank.messages(50.0 + before_next)
    assert (position["at"][:3], position["stopped"]) == ([0, 3, "forward"], False)
    heartbeat.phase(0, 4, Phase.FORWARD)
    assert rank.messages(50.0 + POSITION_INTERVAL_S) == []
    now = 50.0 + POSITION_INTERVAL_S + before_next
    (position,) = rank.messages(now)
    assert (position["at"][1], position["age"]) == (4, pytest.approx(now - position["at"][-1]))
    rank.halted = True
    (position,) = rank.messages(60.0)
    assert position["stopped"] is True


def test_results_are_sent_once_in_order_and_all_at_the_end(rank: Rank) -> None:
    """The third result is missing at the end."""

    def finish(index: int) -> dict[str, Any]:
        (rank.folder / f"finished-{index}-1.json").write_text(json.dumps({"of": index}))
        return {"say": "result", "index": index, "result": {"of": index}}

    second = finish(1)
    assert rank.messages(50.0) == []
    first = finish(0)
    assert rank.messages(50.0) == [first, second]
    assert rank.messages(50.1) == []
    report = {"rank": 1, "outcome": "error", "reason": "x"}
    (rank.folder / "rank-1.json").write_text(json.dumps(report))
    (rank.logs / "rank-1.err").write_text("the end")
    last = finish(3)
    rank.exit(3)
    ended = {"say": "ended", "code": 3, "report": report, "errors": "the end"}
    assert [message for message in rank.messages(50.0) if message["say"] != "position"] == [last, ended]
    assert rank.code == 3


@pytest.mark.parametrize(("code", "kills", "is_oom"), [(-9, 1, True), (-9, 0, False), (-15, 1, False)])
def test_oom_kill_is_detected_by_the_kernel_counter(rank: Rank, code: int, kills: int, is_oom: bool) -> None:
    rank.oom_kills += kills
    rank.exit(code)
    reason = "the kernel ran out of memory and killed the rank"
    report = {"rank": 1, "outcome": "oom", "reason": reason} if is_oom else None
    assert rank.messages(50.0)[-1] == {"say": "ended", "code": code, "report": report, "errors": ""}
    assert rank.code == code


def test_stack_dump_is_requested_and_reported(rank: Rank) -> None:
    errors = rank.logs / "rank-1.err"
    errors.write_text("old (most recent call first)\n")
    rank.dump_stacks()
    assert rank.signals == [(4711, rank_process.STACKS_SIGNAL)]
    assert rank.messages(50.0) == []
    errors.write_text(errors.read_text() * 2)
    assert (rank.messages(50.2), rank.messages(50.3)) == ([{"say": "stacks"}], [])


def test_failed_start_is_reported_as_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[Path, int]:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")

    monkeypatch.setattr(task, "claim_rank_folder", fail)
    reason = "not started: OSError: [Errno 28] No space left on device: '/dev/shm/x'"
    report = {"rank": 1, "outcome": "error", "reason": reason}
    end = {"say": "ended", "code": 1, "errors": "", "report": report}
    with closing(Rank(tmp_path, monkeypatch)) as rank:
        assert rank.messages(50.0) == [{**end, "errno": errno.ENOSPC, "file": "/dev/shm/x"}]
    assert rank.code == 1


def test_close_kills_the_rank_and_removes_its_folder(rank: Rank) -> None:
    rank.close()
    assert rank.signals == [(4711, signal.SIGKILL)]
    assert list(rank.work.iterdir()) == []
    rank.exit(0)
    rank.close()
    assert len(rank.signals) == 1


def test_folders_of_killed_tasks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "scratch_parent", lambda: tmp_path)
    dead = tmp_path / f"{task.RANK_FOLDER_PREFIX}dead"
    dead.mkdir()
    (dead / task.LOCK_FILE).touch()
    claimed = {task.claim_rank_folder()[0] for _ in range(2)}
    assert set(tmp_path.iterdir()) == claimed


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


def test_task_environment_contains_ranks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores per node are divided by four ranks on the first node and by two ranks on the second."""
    monkeypatch.setattr(task.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "1")

    def env(rank: int, launch: TaskLaunch = LAUNCH) -> dict[str, str]:
        return task.task_environment(launch, rank, 6, "127.0.0.1")

    assert {rank: env(rank)["OMP_NUM_THREADS"] for rank in (0, 3, 4, 5)} == {0: "2", 3: "2", 4: "4", 5: "4"}
    last = env(5)
    expected = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NCCL_IB_HCA": "mlx5"}
    expected |= {"GLOO_SOCKET_IFNAME": "lo"}
    assert {key: last.get(key) for key in expected} == expected
    assert not {"NCCL_SOCKET_IFNAME", "MALLOC_MMAP_THRESHOLD_"} & last.keys()
    named = env(0, replace(LAUNCH, interface="ib0", limited=True))
    assert (named["GLOO_SOCKET_IFNAME"], named["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")
    assert named["MALLOC_MMAP_THRESHOLD_"] == str(2**18)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert env(0)["OMP_NUM_THREADS"] == "7", "the user's value counts unless SLURM binds cores"
    for given, threads in (("3", "3"), ("9", "8")):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert env(0)["OMP_NUM_THREADS"] == threads


def test_task_fails_without_a_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    masks: list[int] = []
    monkeypatch.setattr(task.os, "umask", masks.append)
    monkeypatch.setattr(task.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with socket.socket() as silent:  # occupies the port without listening
        silent.bind(("127.0.0.1", 0))
        replace(LAUNCH, port=silent.getsockname()[1], umask=0o022).save(tmp_path)
        assert (task.main([str(tmp_path)]), masks) == (1, [0o022])
    assert "rank 3: cannot connect to the job's controller at 127.0.0.1" in capsys.readouterr().err
