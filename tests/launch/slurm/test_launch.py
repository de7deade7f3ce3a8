"""Tests of a launch on several nodes (rank states from messages of tasks, simulated clock) and of its job step."""

from __future__ import annotations

import errno
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, PropertyMock, call

import pytest

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.launch import rank_process
from repro.launch.job import STOP_FILE, Job
from repro.launch.rank_process import Position
from repro.launch.slurm.allocation import launch, srun_step, task
from repro.launch.slurm.allocation.connection import TASK_ENDED, Listener
from repro.launch.slurm.allocation.launch import ClusterLaunch
from repro.launch.slurm.allocation.srun_step import Allocation, SrunStep
from repro.launch.slurm.allocation.stop import AllocationStop
from repro.launch.slurm.profile import parse_profile
from tests.clock import Clock
from tests.launch.runs import wait_for
from tests.training import TINY

JOB = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=3))])


class Started(ClusterLaunch):
    """Three ranks on two nodes, with an imitated srun and a listener whose messages a test chooses."""

    step: MagicMock
    listener: MagicMock

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
        self._step = self.step = MagicMock(spec=SrunStep, code=None, starts=1)
        self.step.last_error_line.return_value = "Node n2 is not available"
        self._listener = self.listener = MagicMock(spec=Listener, ended={})
        self.listener.messages.return_value = []

    def deliver(self, rank: int, say: str, **message: Any) -> None:
        self.listener.messages.return_value = [(rank, {"say": say, **message})]
        self._receive()
        self.listener.messages.return_value = []

    def polls(self) -> list[int | None]:
        return [self.poll(rank) for rank in range(3)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().rules(monkeypatch, launch)


@pytest.fixture
def started(clock: Clock, tmp_path: Path) -> Started:
    return Started(tmp_path)


def test_launch_file_contains_all_task_settings(tmp_path: Path) -> None:
    environment = {"interface": "ib0", "variables": {"NCCL_IB_HCA": "mlx5"}}
    site = parse_profile({"environment": environment}, file="f")
    allocation: Any = MagicMock(address="127.0.0.1", per_node=2, umask=0o077, site=site)
    nodes = ["n1", "n1", "n2"]
    created = ClusterLaunch(JOB, tmp_path / "logs", allocation, nodes, target="x:y", stop=AllocationStop("7"))
    created.start()
    listener = created._listener
    assert listener is not None
    settings = asdict(task.TaskLaunch.load(created.logs))
    expected = {"address": "127.0.0.1", "port": listener.port, "token": listener._token, "per_node": 2}
    expected |= {"device": "cpu", "target": "x:y", "limited": False, "umask": 0o077, **environment}
    assert settings == expected | {"rendezvous": settings["rendezvous"]}
    assert (created.logs / task.LAUNCH_FILE).stat().st_mode & 0o777 == 0o600
    assert 0 < settings["rendezvous"] != listener.port
    assert len(listener._token) == 32
    assert allocation.step.call_args_list == [call(3, task.__name__, created.logs)]
    assert Job.load(created.logs / task.JOB_FILE) == JOB
    listener.close()


def position_at(seconds: float, step: int = 5, age: float = 0.0, stopped: bool = False) -> dict[str, Any]:
    at = [0, step, "forward", 40, "all_gather", "tp", seconds]
    return {"say": "position", "at": at, "age": age, "stopped": stopped}


def test_position_time_changes_only_with_new_heartbeats(started: Started, clock: Clock) -> None:
    assert [started.position(rank) for rank in range(3)] == [Position(0, 0, Phase.START, 0, "", "", 0.0)] * 3
    started.deliver(1, **position_at(7000.0, age=0.5))
    clock.now = 130.0
    started.deliver(1, **position_at(7000.0, 6, age=30.5, stopped=True))
    assert (started.position(1).seconds, started.position(1).step) == (99.5, 5)
    assert [started.stopped(rank) for rank in range(3)] == [False, True, False]
    started.deliver(1, **position_at(7030.0, 6, age=0.25))
    assert (started.position(1).seconds, started.position(1).step, started.stopped(1)) == (129.75, 6, False)
    assert str(started.position(1)) == "at step 6, forward, after collective all_gather #40 in group tp"
    assert not started.position(0).begun


def test_no_rank_hangs_while_srun_waits_for_slurmctld(started: Started) -> None:
    type(started.step).starts = PropertyMock(
        side_effect=[1, 2]
    )  # the query of the exit code starts srun again
    started._receive()
    assert [started.position(rank).seconds for rank in range(3)] == [100.0, 0.0, 0.0]


def test_results_signals_and_exits_are_stored(started: Started) -> None:
    for rank in range(3):
        assert started.results(1) is None
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
    assert started.polls() == [3, None, None]
    assert (started.report(0), started.error_text(0), started.error_text(1)) == (report, "the end", "")
    for rank, number in ((1, errno.ENOSPC), (2, errno.ENOENT)):
        started.deliver(rank, "ended", code=1, report=None, errors="", errno=number, file="/shared/x")
    full = {"rank": 1, "outcome": "error", "reason": "disk full while starting the ranks: /shared/x"}
    assert [started.report(rank) for rank in (1, 2)] == [full, None]


def test_task_without_signal_is_lost_after_a_delay(started: Started, clock: Clock) -> None:
    started.listener.ended = {2: "no answer from the node for 15 s", 1: TASK_ENDED}
    assert started.polls() == [None, None, 1]
    clock.now += launch.LOST_TASK_GRACE_S - 0.125
    assert (started.poll(1), started.report(1)) == (None, None)
    clock.now += 0.125
    assert started.polls() == [None, 1, 1]
    lost = {"rank": 1, "outcome": "error", "reason": f"lost node n1: {TASK_ENDED}"}
    assert (started.report(0), started.report(1)) == (None, lost)
    started.ask_to_stop()
    assert (started.logs / STOP_FILE).exists()
    assert started.report(1) == lost | {"outcome": "interrupted"}, "SLURM may kill a task before it reports"
    started.kill()
    assert started.step.end.call_args_list == [call(launch.LOST_NODE_REAP_TIMEOUT_S)]
    assert started.listener.close.called
    started.close(keep_logs=None)
    assert (started.stop._why, started.stop.requeue) == (lost["reason"], True)
    assert not started.logs.exists()
    started._receive()  # after the close, no task sends messages


def test_task_that_did_not_start_reports_srun_error(started: Started, clock: Clock) -> None:
    started.listener.has_connected.side_effect = lambda rank: rank < 2
    assert started.polls() == [None] * 3
    started.step.code = 1
    assert started.poll(0) is None
    clock.now += launch.LOST_TASK_GRACE_S
    assert started.polls() == [None, None, 1]
    lost = "lost node n2: the rank's task did not start: Node n2 is not available"
    assert started.report(2) == {"rank": 2, "outcome": "error", "reason": lost}


def test_close_waits_for_tasks_and_moves_logs(started: Started, tmp_path: Path) -> None:
    (started.logs / task.LAUNCH_FILE).touch()
    (started.logs / "rank-0.err").touch()
    started.close(keep_logs=tmp_path / "kept")
    assert started.step.end.call_args_list == [call(launch.REAP_TIMEOUT_S)]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["rank-0.err"]
    assert (started.logs.exists(), bool(started.stop)) == (False, False)
    again = Started(tmp_path)
    again.close(keep_logs=again.logs)
    assert again.logs.exists()


TAKEN = "RuntimeError: EADDRINUSE: address already in use"


@pytest.mark.parametrize(("reason", "errors"), [(TAKEN, ""), ("", TAKEN.upper())])
def test_occupied_port_is_replaced_twice(started: Started, reason: str, errors: str) -> None:
    report = {"rank": 0, "outcome": "error", "reason": reason} if reason else None
    for code, start_count in ((None, 2), (None, 3), (1, 3)):
        started.deliver(0, "ended", code=1, report=report, errors=errors)
        assert (started.poll(0), started.start_count) == (code, start_count)


def test_other_failures_do_not_change_the_port(started: Started) -> None:
    taken = {"say": "ended", "code": 1, "report": None, "errors": TAKEN}
    started.deliver(0, **{**taken, "errors": "KeyError"})
    assert (started.poll(0), started.start_count) == (1, 1)
    started._begin()
    started.deliver(0, **position_at(1.0))
    started.deliver(0, **taken)
    assert (started.poll(0), started.start_count) == (1, 2), "the rank had begun"
    started._begin()
    started._ports = 1
    started.deliver(1, **taken)
    assert (started.polls(), started.start_count) == ([None, 1, None], 3), "only rank 0 opens the port"


def test_stack_dump_waits_for_running_ranks(started: Started, clock: Clock) -> None:
    started.deliver(0, "ended", code=0, report=None, errors="")
    started.deliver(1, **position_at(1.0, stopped=True))
    started.dump_stacks()
    assert started.step.signal.call_args_list == [call(rank_process.STACKS_SIGNAL)]
    waited_s = clock.now - 100 - (rank_process.STACKS_TIMEOUT_S + task.POSITION_INTERVAL_S)
    assert 0 <= waited_s < 2 * launch.POLL_INTERVAL_S
    started.deliver(2, "stacks")
    clock.now = 200.0
    started.dump_stacks()
    assert clock.now == 200.0
    assert (started.logs / "positions.txt").read_text().splitlines() == [
        "rank 0 on n1: at start-up",
        "rank 1 on n1: at step 5, forward, after collective all_gather #40 in group tp",
        "rank 2 on n2: at start-up",
    ]


@pytest.mark.parametrize(("tasks", "nodes"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_allocation_starts_a_step_with_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, nodes: int
) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(srun_step, "SrunStep", lambda *given: steps.append(given))
    allocation = Allocation(nodes=3, per_node=2, site=parse_profile({}, file="f"), address="a", umask=0)
    allocation.step(tasks, "module", tmp_path)
    command = [
        *("srun", "--overlap", "--relative=0", f"--nodes={nodes}", f"--ntasks={tasks}"),
        *("--distribution=plane=2", "--kill-on-bad-exit=0", "--wait=0"),
        *(sys.executable, "-m", "module", str(tmp_path)),
    ]
    assert (allocation.tasks, steps) == (6, [(command, tmp_path / "srun.err")])


def step(folder: Path, text: str) -> SrunStep:
    return SrunStep(["sh", "-c", text], folder / "srun.err")


def test_step_has_exit_code_and_last_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    ended = step(tmp_path, 'echo first >&2; echo "$SLURM_JOB_ID$SLURM_STEP_ID last" >&2; exit 3')
    wait_for(lambda: ended.code is not None)
    assert (ended.code, ended.starts, ended.last_error_line()) == (3, 1, "12 last")
    ended.signal(signal.SIGUSR1)
    (tmp_path / "srun.err").write_text("x" * 301)
    assert ended.last_error_line() == "x" * 300
    (tmp_path / "srun.err").write_text("\n")
    assert ended.last_error_line() == ""
    (tmp_path / "srun.err").unlink()
    assert ended.last_error_line() == ""


def test_step_receives_signals_and_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    heard = step(tmp_path, f"trap 'echo heard >&2; exit 4' USR1; touch {ready}; while :; do sleep 0.02; done")
    wait_for(ready.exists)
    heard.signal(signal.SIGUSR1)
    heard.end(10.0)
    assert (heard.code, heard.last_error_line()) == (4, "heard")
    sleeping = step(tmp_path, "exec sleep 60")
    assert sleeping.code is None
    sleeping.end(0.01)
    assert sleeping.code == -signal.SIGKILL


def test_step_restarts_while_slurmctld_is_unavailable(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ] && exit 0; "
    text += "echo 'srun: error: Unable to contact slurm controller' >&2; exit 1"
    retried = step(tmp_path, text)
    wait_for(lambda: retried.code is not None)
    assert (retried.code, retried.starts) == (0, 3)
    count.unlink()
    retried = step(tmp_path, text)
    retried.end(10.0)
    assert (retried.code, retried.starts) == (1, 1), "an ended step does not restart"
