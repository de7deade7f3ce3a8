"""Tests of a launch on several nodes, whose rank states follow from the messages of tasks, on a simulated clock."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.launch import rank_process
from repro.launch.job import Job
from repro.launch.rank_process import Position
from repro.launch.slurm.allocation import launch, task
from repro.launch.slurm.allocation.connection import TASK_ENDED, Message
from repro.launch.slurm.allocation.launch import ClusterLaunch
from repro.launch.slurm.allocation.stop import AllocationStop
from repro.launch.slurm.profile import parse_profile
from tests.clock import Clock
from tests.training import TINY

JOB = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=3))])


class Step:
    """An `srun` process whose exit code a test sets."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.starts = 1
        self.ends: list[float] = []
        self.signals: list[int] = []

    def last_error_line(self) -> str:
        return "Node n2 is not available"

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def end(self, seconds: float) -> None:
        self.ends.append(seconds)


class Listener:
    """A listener of three connected tasks, whose messages a test chooses."""

    port = 1

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.connected = {0, 1, 2}
        self.queued: list[tuple[int, Message]] = []
        self.open = True

    def messages(self) -> list[tuple[int, Message]]:
        found, self.queued = self.queued, []
        return found

    def has_connected(self, rank: int) -> bool:
        return rank in self.connected

    def close(self) -> None:
        self.open = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().rules(monkeypatch, launch)


class Started(ClusterLaunch):
    """Three ranks on two nodes."""

    step: Step
    listener: Listener

    def __init__(self, folder: Path):
        unused: Any = None
        self.stop, self.start_count = AllocationStop("7"), 0
        super().__init__(JOB, folder / "logs", unused, ["n1", "n1", "n2"], target="x:y", stop=self.stop)
        self.logs.mkdir()
        self._begin()

    def _begin(self) -> None:
        self.start_count += 1
        self._ports += 1
        self._ranks = [launch._RankStatus() for _ in range(self.world)]
        self.step, self.listener = Step(), Listener()
        self._step, self._listener = self.step, self.listener  # type: ignore[assignment]

    def deliver(self, rank: int, say: str, **message: Any) -> None:
        self.listener.queued.append((rank, {"say": say, **message}))
        self._receive()


@pytest.fixture
def started(clock: Clock, tmp_path: Path) -> Started:
    return Started(tmp_path)


def test_launch_file_contains_all_task_settings(tmp_path: Path) -> None:
    environment = {"interface": "ib0", "variables": {"NCCL_IB_HCA": "mlx5"}}
    allocation: Any = SimpleNamespace(
        address="127.0.0.1",
        per_node=2,
        umask=0o077,
        step=lambda *given: given,
        site=parse_profile({"environment": environment}, file="f"),
    )
    created = ClusterLaunch(
        JOB, tmp_path / "logs", allocation, ["n1", "n1", "n2"], target="x:y", stop=AllocationStop("7")
    )
    created.start()
    settings = launch.task.TaskLaunch.load(created.logs)
    assert created._listener is not None
    assert (settings.address, settings.port, settings.token) == (
        "127.0.0.1",
        created._listener.port,
        created._listener._token,
    )
    assert (settings.per_node, settings.device, settings.target, settings.limited, settings.umask) == (
        2,
        "cpu",
        "x:y",
        False,
        0o077,
    )
    assert (settings.interface, settings.variables) == ("ib0", {"NCCL_IB_HCA": "mlx5"})
    assert 0 < settings.rendezvous != settings.port
    assert len(settings.token) == 32
    assert (created._ports, created._step) == (1, (3, launch.task.__name__, created.logs))
    assert Job.load(created.logs / task.JOB_FILE) == JOB
    created._listener.close()


def position_fields(seconds: float, step: int = 5) -> list[Any]:
    return [0, step, "forward", 40, "all_gather", "tp", seconds]


def test_position_time_changes_only_with_new_heartbeats(started: Started, clock: Clock) -> None:
    assert [started.position(rank) for rank in range(3)] == [Position(0, 0, Phase.START, 0, "", "", 0.0)] * 3
    started.deliver(1, "position", at=position_fields(7000.0), age=0.5, stopped=False)
    clock.now = 130.0
    started.deliver(1, "position", at=position_fields(7000.0, 6), age=30.5, stopped=True)
    assert (started.position(1).seconds, started.position(1).step) == (99.5, 5)
    assert [started.stopped(rank) for rank in range(3)] == [False, True, False]
    started.deliver(1, "position", at=position_fields(7030.0, 6), age=0.25, stopped=False)
    assert (started.position(1).seconds, started.position(1).step, started.stopped(1)) == (129.75, 6, False)
    assert str(started.position(1)) == "at step 6, forward, after all_gather #40 on tp"
    assert not started.position(0).begun


def test_no_rank_hangs_while_srun_waits_for_slurmctld(started: Started, clock: Clock) -> None:
    class RestartingStep(Step):
        """A step whose srun starts again at each query of its exit code."""

        def __getattribute__(self, name: str) -> Any:
            if name == "code":
                self.starts += 1
            return super().__getattribute__(name)

    restarting: Any = RestartingStep()
    started._step = restarting
    started._receive()
    assert [started.position(rank).seconds for rank in range(3)] == [100.0, 0.0, 0.0]


def test_results_signals_and_exits_are_stored(started: Started) -> None:
    for rank in range(3):
        started.deliver(rank, "result", index=1, result={"rank": rank})
    assert started.results(1) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert started.results(0) is None
    started.deliver(2, "signal", number=int(signal.SIGUSR2))
    assert not started.stop
    started.deliver(2, "signal", number=int(signal.SIGTERM))
    assert (started.stop.terminated, started.stop._terminated_node) == (True, "n2")
    started.deliver(3, "ended", code=1, report=None, errors="of nobody")
    report = {"rank": 0, "outcome": "oom"}
    started.deliver(0, "ended", code=3, report=report, errors="the end")
    assert [started.poll(rank) for rank in range(3)] == [3, None, None]
    assert (started.report(0), started.error_text(0), started.error_text(1)) == (report, "the end", "")
    for rank, number in ((1, errno.ENOSPC), (2, errno.ENOENT)):
        started.deliver(rank, "ended", code=1, report=None, errors="", errno=number, file="/shared/x")
    full = {"rank": 1, "outcome": "error", "reason": "disk full while starting the ranks: /shared/x"}
    assert [started.report(rank) for rank in (1, 2)] == [full, None]


def test_task_without_signal_is_lost_after_a_delay(started: Started, clock: Clock) -> None:
    started.listener.ended = {2: "no answer from the node for 15 s", 1: TASK_ENDED}
    assert [started.poll(rank) for rank in range(3)] == [None, None, 1]
    clock.now += launch.LOST_TASK_GRACE_S - 0.125
    assert started.poll(1) is None
    clock.now += 0.125
    assert [started.poll(rank) for rank in range(3)] == [None, 1, 1]
    assert started.report(1) == {"rank": 1, "outcome": "error", "reason": f"lost node n1: {TASK_ENDED}"}
    started.kill()
    assert (started.step.ends, started.listener.open) == ([launch.LOST_NODE_REAP_TIMEOUT_S], False)
    started.close(keep_logs=None)
    assert started.stop._why == f"lost node n1: {TASK_ENDED}"
    assert started.stop.requeue
    assert not started.logs.exists()
    started._receive()  # after the close, no task sends messages


def test_task_that_did_not_start_reports_srun_error(started: Started, clock: Clock) -> None:
    started.listener.connected = {0, 1}
    assert started.poll(0) is None
    assert started.poll(2) is None
    started.step.code = 1
    assert started.poll(0) is None
    clock.now += launch.LOST_TASK_GRACE_S
    assert [started.poll(rank) for rank in range(3)] == [None, None, 1]
    lost = "lost node n2: the rank's task did not start: Node n2 is not available"
    assert started.report(2) == {"rank": 2, "outcome": "error", "reason": lost}


def test_close_waits_for_tasks_and_moves_logs(started: Started, tmp_path: Path) -> None:
    (started.logs / launch.task.LAUNCH_FILE).touch()
    (started.logs / "rank-0.err").touch()
    started.close(keep_logs=tmp_path / "kept")
    assert started.step.ends == [launch.REAP_TIMEOUT_S]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["rank-0.err"]
    assert (started.logs.exists(), bool(started.stop)) == (False, False)
    again = Started(tmp_path)
    again.close(keep_logs=again.logs)
    assert again.logs.exists()


@pytest.mark.parametrize("source", ["report", "errors"])
def test_occupied_port_is_replaced_twice(started: Started, source: str) -> None:
    taken = "RuntimeError: EADDRINUSE: address already in use"
    report = {"rank": 0, "outcome": "error", "reason": taken} if source == "report" else None
    end: dict[str, Any] = {"code": 1, "report": report, "errors": taken if source == "errors" else ""}
    for code, start_count in ((None, 2), (None, 3), (1, 3)):
        started.deliver(0, "ended", **end)
        assert (started.poll(0), started.start_count) == (code, start_count)


def test_other_failures_do_not_change_the_port(started: Started) -> None:
    taken = {"code": 1, "report": None, "errors": "Address already in use"}
    started.deliver(0, "ended", **{**taken, "errors": "KeyError"})
    assert (started.poll(0), started.start_count) == (1, 1)
    started._begin()
    started.deliver(0, "position", at=position_fields(1.0), age=0.0, stopped=False)
    started.deliver(0, "ended", **taken)
    assert (started.poll(0), started.start_count) == (1, 2)
    started._begin()
    started._ports = 1
    started.deliver(1, "ended", **taken)
    assert [started.poll(0), started.poll(1), started.start_count] == [None, 1, 3]


def test_stack_dump_waits_for_running_ranks(started: Started, clock: Clock) -> None:
    started.deliver(0, "ended", code=0, report=None, errors="")
    started.deliver(1, "position", at=position_fields(1.0), age=0.0, stopped=True)
    started.dump_stacks()
    assert started.step.signals == [rank_process.STACKS_SIGNAL]
    assert (
        0
        <= clock.now - 100 - (rank_process.STACKS_TIMEOUT_S + task.POSITION_INTERVAL_S)
        < 2 * launch.POLL_INTERVAL_S
    )
    started.deliver(2, "stacks")
    clock.now = 200.0
    started.dump_stacks()
    assert clock.now == 200.0
    assert (started.logs / "positions.txt").read_text().splitlines() == [
        "rank 0 on n1: at start-up",
        "rank 1 on n1: at step 5, forward, after all_gather #40 on tp",
        "rank 2 on n2: at start-up",
    ]
