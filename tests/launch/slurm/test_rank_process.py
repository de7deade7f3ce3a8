"""A rank's process as its task sees it: what is news, how its end is told, what keeps it from starting."""

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
    """A rank that a test moves."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, seconds: float) -> None: ...


class Rank(RankProcess):
    """Rank 1 of two, on a node whose memory is a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.logs, self.work, self.signals = folder / "logs", folder / "work", []
        for made in (self.logs, self.work):
            made.mkdir()
        Job(experiments=EXPERIMENTS).save(self.logs / task.JOB_FILE)
        self.child = Process()
        self.kernel, self.halted = 3, False
        self.commands: list[tuple[list[str], dict[str, Any]]] = []

        def popen(command: list[str], **how: Any) -> Process:
            self.commands.append((command, how))
            return self.child

        monkeypatch.setattr(task, "scratch_parent", lambda: self.work)
        monkeypatch.setattr(task, "count_kernel_oom_kills", lambda: self.kernel)
        monkeypatch.setattr(
            rank_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen})
        )
        monkeypatch.setattr(task.os, "killpg", lambda pid, number: self.signals.append((pid, number)))
        monkeypatch.setattr(task.rank_process, "is_stopped", lambda pid: self.halted)
        super().__init__("tcp://n1:5", "cpu", "x:y", self.logs, 1, 2)

    def message(self, now: float) -> list[dict[str, Any]]:
        return list(self.news(now))


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with closing(Rank(tmp_path, monkeypatch)) as made:
        yield made


def test_where_it_is_is_news_now_and_then_and_when_it_begins_another_experiment(rank: Rank) -> None:
    rank.start({"RANK": "1"})
    ((command, how),) = rank.commands
    (folder,) = rank.work.iterdir()
    words = {
        "--rank": "1",
        "--device": "cpu",
        "--rendezvous": "tcp://n1:5",
        "--target": "x:y",
        "--folder": str(folder),
    }
    assert {key: command[command.index(key) + 1] for key in words} == words
    assert (how["env"], how["start_new_session"], how["stdin"]) == ({"RANK": "1"}, True, subprocess.DEVNULL)
    assert (how["stdout"].name, how["stderr"].name) == (f"{rank.logs}/rank-1.out", f"{rank.logs}/rank-1.err")
    heartbeat = HeartbeatWriter(folder / "heartbeat", 1)
    assert rank.message(50.0) == [], "it has said nothing yet"
    assert rank.message(50.0 + POSITION_INTERVAL_S - 0.125) == []
    heartbeat.phase(0, 3, Phase.FORWARD)
    (place,) = rank.message(50.0 + POSITION_INTERVAL_S - 0.125)
    assert place["at"][:3] == [0, 3, "forward"]
    assert place["stopped"] is False
    heartbeat.phase(0, 4, Phase.FORWARD)
    assert rank.message(50.0 + POSITION_INTERVAL_S) == []
    (place,) = rank.message(50.0 + 2 * POSITION_INTERVAL_S - 0.125)
    assert (place["at"][1], place["age"]) == (
        4,
        pytest.approx(50.0 + 2 * POSITION_INTERVAL_S - 0.125 - place["at"][-1]),
    )
    rank.halted = True
    (place,) = rank.message(60.0)
    assert place["stopped"] is True


def test_results_come_one_after_the_other_and_at_the_end_all_that_there_are(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.message(50.0)
    (folder / "finished-1-1.json").write_text('{"of": 1}')
    assert rank.message(50.1) == [], "that of the first has yet to come"
    (folder / "rank-1.json").write_text('{"rank": 1, "outcome": "error", "reason": "x"}')
    (rank.logs / "rank-1.err").write_text("the end")
    rank.child.code = 3
    report = {"rank": 1, "outcome": "error", "reason": "x"}
    ended = {"say": "ended", "code": 3, "report": report, "errors": "the end"}
    assert [m for m in rank.message(50.2) if m["say"] != "position"] == [
        *({"say": "result", "index": 1, "result": {"of": 1}}, ended)
    ]
    assert rank.code == 3


def test_a_result_is_reported_once(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.message(50.0)
    for index in range(2):
        (folder / f"finished-{index}-1.json").write_text(json.dumps({"of": index}))
    found = [{"say": "result", "index": index, "result": {"of": index}} for index in range(2)]
    assert (rank.message(50.1), rank.message(50.2)) == (found, [])


@pytest.mark.parametrize(("code", "kills", "known"), [(-9, 1, True), (-9, 0, False), (-15, 1, False)])
def test_who_was_killed_for_want_of_memory_is_told_by_the_kernels_count(
    rank: Rank, code: int, kills: int, known: bool
) -> None:
    rank.start({})
    rank.kernel += kills
    rank.child.code = code
    reason = "killed by the kernel, which ran out of memory"
    report = {"rank": 1, "outcome": "oom", "reason": reason} if known else None
    assert rank.message(50.0)[-1] == {"say": "ended", "code": code, "report": report, "errors": ""}
    assert rank.code == code


def test_its_stacks_are_asked_for_and_seen(rank: Rank) -> None:
    rank.start({})
    errors = rank.logs / "rank-1.err"
    errors.write_text("old (most recent call first)\n")
    rank.message(50.0)
    rank.dump_stacks()
    assert rank.signals == [(4711, rank_process.STACKS_SIGNAL)]
    assert rank.message(50.1) == []
    errors.write_text(errors.read_text() * 2)
    assert (rank.message(50.2), rank.message(50.3)) == ([{"say": "stacks"}], [])


def test_the_wish_to_stop_is_passed_on(rank: Rank) -> None:
    rank.start({})
    (folder,) = rank.work.iterdir()
    rank.message(50.0)
    assert not (folder / STOP_FILE).exists()
    (rank.logs / STOP_FILE).touch()
    rank.message(50.5)
    assert not (folder / STOP_FILE).exists(), "a shared folder is looked at once a second"
    rank.message(51.0)
    assert (folder / STOP_FILE).exists()


def test_what_keeps_it_from_starting_is_the_news(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> tuple[Path, int]:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")

    monkeypatch.setattr(task, "claim_rank_folder", full)
    rank.start({})
    reason = "not started: OSError: [Errno 28] No space left on device: '/dev/shm/x'"
    assert rank.message(50.0) == [
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


def test_it_leaves_nothing(rank: Rank) -> None:
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
