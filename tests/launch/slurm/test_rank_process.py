"""Tests of the process of a rank in its task: messages on its progress, its exit and failed starts."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.launch import rank_process
from repro.launch.job import STOP_FILE, Job
from repro.launch.rank_process import HeartbeatWriter
from repro.launch.slurm.allocation import task
from repro.launch.slurm.allocation.task import POSITION_INTERVAL_S, RankProcess
from tests.training import TINY

EXPERIMENTS = [Experiment(name=name, model=TINY, layout=Layout(dp=2)) for name in "ab"]


class Process:
    """A rank process whose exit code a test sets."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, seconds: float) -> None: ...


class Rank(RankProcess):
    """Rank 1 of two ranks, whose shared memory is a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.logs, self.work, self.signals = folder / "logs", folder / "work", []
        for created in (self.logs, self.work):
            created.mkdir()
        Job(experiments=EXPERIMENTS).save(self.logs / task.JOB_FILE)
        self.child = Process()
        self.oom_kills, self.halted = 3, False
        self.commands: list[tuple[list[str], dict[str, Any]]] = []

        def popen(command: list[str], **how: Any) -> Process:
            self.commands.append((command, how))
            return self.child

        monkeypatch.setattr(task, "scratch_parent", lambda: self.work)
        monkeypatch.setattr(task, "count_kernel_oom_kills", lambda: self.oom_kills)
        monkeypatch.setattr(
            rank_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen})
        )
        monkeypatch.setattr(task.os, "killpg", lambda pid, number: self.signals.append((pid, number)))
        monkeypatch.setattr(task.rank_process, "is_stopped", lambda pid: self.halted)
        super().__init__("tcp://n1:5", "cpu", "x:y", self.logs, 1, 2)

    def messages(self, now: float) -> list[dict[str, Any]]:
        return list(self.news(now))


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with closing(Rank(tmp_path, monkeypatch)) as created:
        yield created


def test_position_is_sent_periodically_and_for_new_experiments(rank: Rank) -> None:
    rank.start({"RANK": "1"})
    ((command, how),) = rank.commands
    (folder,) = rank.work.iterdir()
    options = {
        "--rank": "1",
        "--device": "cpu",
        "--rendezvous": "tcp://n1:5",
        "--target": "x:y",
        "--folder": str(folder),
    }
    assert {key: command[command.index(key) + 1] for key in options} == options
    assert (how["env"], how["start_new_session"], how["stdin"]) == ({"RANK": "1"}, True, subprocess.DEVNULL)
    assert (how["stdout"].name, how["stderr"].name) == (f"{rank.logs}/rank-1.out", f"{rank.logs}/rank-1.err")
    heartbeat = HeartbeatWriter(folder / "heartbeat", 1)
    assert rank.messages(50.0) == [], "no heartbeat was written"
    assert rank.messages(50.0 + POSITION_INTERVAL_S - 0.125) == []
    heartbeat.phase(0, 3, Phase.FORWARD)
    (position,) = rank.messages(50.0 + POSITION_INTERVAL_S - 0.125)
    assert position["at"][:3] == [0, 3, "forward"]
    assert position["stopped"] is False
    heartbeat.phase(0, 4, Phase.FORWARD)
    assert rank.messages(50.0 + POSITION_INTERVAL_S) == []
    (position,) = rank.messages(50.0 + 2 * POSITION_INTERVAL_S - 0.125)
    assert (position["at"][1], position["age"]) == (
        4,
        pytest.approx(50.0 + 2 * POSITION_INTERVAL_S - 0.125 - position["at"][-1]),
    )
    rank.halted = True
    (position,) = rank.messages(60.0)
    assert position["stopped"] is True


def test_all_results_are_sent_at_the_end(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.messages(50.0)
    (folder / "finished-1-1.json").write_text('{"of": 1}')
    assert rank.messages(50.1) == [], "the first result is missing"
    (folder / "rank-1.json").write_text('{"rank": 1, "outcome": "error", "reason": "x"}')
    (rank.logs / "rank-1.err").write_text("the end")
    rank.child.code = 3
    report = {"rank": 1, "outcome": "error", "reason": "x"}
    ended = {"say": "ended", "code": 3, "report": report, "errors": "the end"}
    assert [m for m in rank.messages(50.2) if m["say"] != "position"] == [
        *({"say": "result", "index": 1, "result": {"of": 1}}, ended)
    ]
    assert rank.code == 3


def test_results_are_sent_once(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.messages(50.0)
    for index in range(2):
        (folder / f"finished-{index}-1.json").write_text(json.dumps({"of": index}))
    found = [{"say": "result", "index": index, "result": {"of": index}} for index in range(2)]
    assert (rank.messages(50.1), rank.messages(50.2)) == (found, [])


@pytest.mark.parametrize(("code", "kills", "is_oom"), [(-9, 1, True), (-9, 0, False), (-15, 1, False)])
def test_oom_kill_is_detected_by_the_kernel_counter(rank: Rank, code: int, kills: int, is_oom: bool) -> None:
    rank.start({})
    rank.oom_kills += kills
    rank.child.code = code
    reason = "killed by the kernel, which ran out of memory"
    report = {"rank": 1, "outcome": "oom", "reason": reason} if is_oom else None
    assert rank.messages(50.0)[-1] == {"say": "ended", "code": code, "report": report, "errors": ""}
    assert rank.code == code


def test_stack_dump_is_requested_and_reported(rank: Rank) -> None:
    rank.start({})
    errors = rank.logs / "rank-1.err"
    errors.write_text("old (most recent call first)\n")
    rank.messages(50.0)
    rank.dump_stacks()
    assert rank.signals == [(4711, rank_process.STACKS_SIGNAL)]
    assert rank.messages(50.1) == []
    errors.write_text(errors.read_text() * 2)
    assert (rank.messages(50.2), rank.messages(50.3)) == ([{"say": "stacks"}], [])


def test_stop_request_is_forwarded(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.messages(50.0)
    assert not (folder / STOP_FILE).exists()
    (rank.logs / STOP_FILE).touch()
    rank.messages(50.5)
    assert not (folder / STOP_FILE).exists(), "the shared folder is polled once per second"
    rank.messages(51.0)
    assert (folder / STOP_FILE).exists()


def test_failed_start_is_reported_as_exit(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[Path, int]:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")

    monkeypatch.setattr(task, "claim_rank_folder", fail)
    rank.start({})
    reason = "not started: OSError: [Errno 28] No space left on device: '/dev/shm/x'"
    assert rank.messages(50.0) == [
        {
            "say": "ended",
            "code": 1,
            "errors": "",
            "errno": errno.ENOSPC,
            "file": "/dev/shm/x",
            "report": {"rank": 1, "outcome": "error", "reason": reason},
        }
    ]
    assert rank.code == 1


def test_close_kills_the_rank_and_removes_its_folder(rank: Rank) -> None:
    rank.start({})
    rank.close()
    assert rank.signals == [(4711, signal.SIGKILL)]
    assert list(rank.work.iterdir()) == []
    rank.child.code = 0
    rank.close()
    assert len(rank.signals) == 1


def test_folders_of_killed_tasks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "scratch_parent", lambda: tmp_path)
    dead = tmp_path / f"{task.RANK_FOLDER_PREFIX}dead"
    dead.mkdir()
    (dead / task.LOCK_FILE).touch()
    first, _ = task.claim_rank_folder()
    second, _ = task.claim_rank_folder()
    assert not dead.exists()
    assert first.exists()
    assert second.exists()
