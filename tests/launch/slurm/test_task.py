"""Tests of tasks and of the end of a job: the environment of a rank, its messages, and the requeue of the job."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from repro.launch.slurm.allocation import controller, task
from repro.launch.slurm.allocation.stop import AllocationStop
from repro.launch.slurm.allocation.task import TaskLaunch
from tests.clock import Clock

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

    def env(rank: int, launch: TaskLaunch = LAUNCH) -> dict[str, str]:
        return task.task_environment(launch, rank, 6, "127.0.0.1")

    assert {rank: env(rank)["OMP_NUM_THREADS"] for rank in (0, 3, 4, 5)} == {0: "2", 3: "2", 4: "4", 5: "4"}
    last = env(5)
    assert (last["RANK"], last["WORLD_SIZE"], last["LOCAL_WORLD_SIZE"]) == ("5", "6", "2")
    assert (last["MASTER_ADDR"], last["MASTER_PORT"], last["NCCL_IB_HCA"]) == ("127.0.0.1", "29500", "mlx5")
    assert last["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in last
    assert "MALLOC_MMAP_THRESHOLD_" not in last
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
    monkeypatch.setattr(task.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with socket.socket() as silent:  # occupies the port without listening
        silent.bind(("127.0.0.1", 0))
        replace(LAUNCH, port=silent.getsockname()[1], umask=0o022).save(tmp_path)
        assert task.main([str(tmp_path)]) == 1
    assert "rank 3: cannot connect to the job's controller at 127.0.0.1" in capsys.readouterr().err


class Rank:
    """A rank that sends three messages and then ends with its exit code."""

    code: int | None = None

    def __init__(self, *arguments: Any, code: int | None = None, log: list[Any]):
        self.log, self.end, self.polls = log, code, 0
        log.append(("made", *arguments))

    def start(self, environment: dict[str, str]) -> None:
        self.log.append(("started", environment["RANK"], environment["WORLD_SIZE"]))

    def news(self, now: float) -> Iterator[dict[str, Any]]:
        self.polls += 1
        yield {"say": self.polls}
        if self.polls == 3:
            self.code = self.end

    def dump_stacks(self) -> None:
        self.log.append("stacks")

    def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (7, 7), (-9, 137), (None, 137)])
def test_task_forwards_messages_and_exit_code_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, exit_code: int
) -> None:
    """The task also forwards signals. Without a controller, it kills the rank and exits with code 137 = 128 + 9."""
    handlers: dict[int, Any] = {}
    log: list[Any] = []

    class FakeConnection:
        def __init__(self, address: str, port: int, *, token: str, rank: int):
            self.address, self.open, self.waits = "127.0.0.1", True, 0
            log.append((address, port, token, rank))

        def send(self, message: dict[str, Any]) -> None:
            log.append(message)

        def wait(self, seconds: float) -> None:
            assert seconds == task.POLL_INTERVAL_S
            self.waits += 1
            if self.waits == 1:
                for number in (task.rank_process.STACKS_SIGNAL, signal.SIGTERM):
                    handlers[number](number, None)
            self.open = self.waits < 4

    monkeypatch.setattr(task.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(task, "Connection", FakeConnection)
    monkeypatch.setattr(task, "RankProcess", lambda *arguments: Rank(*arguments, code=code, log=log))
    monkeypatch.setattr(task.os, "umask", log.append)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    replace(LAUNCH, port=99).save(tmp_path)
    assert task.main([str(tmp_path)]) == exit_code
    assert set(handlers) == {signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1}
    fourth = [] if code is not None else [{"say": 4}]
    assert log == [
        0o077,
        ("127.0.0.1", 99, "secret", 3),
        ("made", "tcp://127.0.0.1:29500", "cpu", "x:y", tmp_path, 3, 6),
        ("started", "3", "6"),
        *({"say": 1}, {"say": 2}, "stacks", {"say": "signal", "number": int(signal.SIGTERM)}, {"say": 3}),
        *(*fourth, "closed"),
    ]


@pytest.mark.parametrize(
    ("open", "signals", "has_handler", "end"),
    [
        (0, [], True, None),
        (0, [signal.SIGUSR2], True, None),
        (2, [], True, None),
        (2, [signal.SIGUSR2], True, 128 + signal.SIGUSR2),
        (2, [signal.SIGUSR2], False, 128 + signal.SIGUSR2),
        (2, [signal.SIGTERM], True, 128 + signal.SIGTERM),
        (2, [signal.SIGTERM, signal.SIGUSR2], True, 128 + signal.SIGUSR2),
    ],
)
def test_job_requests_a_requeue_for_open_cases(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open: int,
    signals: list[int],
    has_handler: bool,
    end: int | None,
) -> None:
    """submitit's handler of SIGUSR2 requeues the job."""
    submitit = MagicMock()
    waited: list[Any] = []
    handlers: dict[int, Any] = {
        signal.SIGTERM: "earlier",
        signal.SIGUSR2: submitit if has_handler else signal.SIG_DFL,
    }
    before = dict(handlers)

    def swap(number: int, handler: Any) -> Any:
        old, handlers[number] = handlers.get(number), handler
        return old

    def control(
        folder: Path, index: int, stop: AllocationStop, environment: dict[str, str]
    ) -> SimpleNamespace:
        assert (folder, index, stop._job, stop._restarts) == (tmp_path, 2, "12_3", 4)
        for number in signals:
            handlers[number](number, None)
        return SimpleNamespace(open=open, count_outcomes=lambda: {"ok": 2, "hang": 1})

    monkeypatch.setattr(controller.signal, "signal", swap)
    monkeypatch.setattr(controller, "_wait_for_requeue_signal", waited.append)
    monkeypatch.setattr(controller, "run_bundle", control)
    for name, value in (("ARRAY_JOB_ID", "12"), ("ARRAY_TASK_ID", "3"), ("RESTART_COUNT", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    run = controller.RunBundle(str(tmp_path), 2)
    if end is None:
        assert run() == {"ok": 2, "hang": 1}
    else:
        with pytest.raises(SystemExit) as left:
            run()
        assert left.value.code == end
    assert handlers == before
    requeued = has_handler and end == 128 + signal.SIGUSR2
    assert submitit.call_args_list == ([call(signal.SIGUSR2, None)] if requeued else [])
    assert len(waited) == int(end == 128 + signal.SIGTERM)
    again = run.checkpoint()
    assert (again.function, again.args, again.kwargs) == (run, (), {})


def test_sigterm_waits_for_the_requeue_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption sends both signals. `scancel` sends only SIGTERM, and the wait ends at its timeout."""
    stop, clock = AllocationStop("7"), Clock().rules(monkeypatch, controller)
    controller._wait_for_requeue_signal(stop)
    assert clock.now == pytest.approx(
        100 + controller.REQUEUE_SIGNAL_TIMEOUT_S, abs=controller.POLL_INTERVAL_S
    )
    clock.slept.clear()
    clock.asleep = lambda: stop.note(signal.SIGUSR2, None)
    controller._wait_for_requeue_signal(stop)
    assert clock.slept == [controller.POLL_INTERVAL_S]
