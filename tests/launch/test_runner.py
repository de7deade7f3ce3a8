"""Tests of the runner: comparisons, interrupts, blamed experiments, locks and launches that do not start."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Experiment, Layout, Training
from repro.config.enums import Phase
from repro.config.suites import Comparison
from repro.emulate.network import NoNetwork
from repro.launch import plan, runner, supervise
from repro.launch.job import STOP_TIMEOUT_S, Interrupt, Job
from repro.launch.plan import Task
from repro.launch.rank_process import Position
from repro.launch.recorder import DiskFull
from repro.launch.runner import Runner
from repro.launch.supervise import Ending
from tests.clock import Clock
from tests.training import TINY


def experiment(name: str) -> Experiment:
    return Experiment(name=name, model=TINY, layout=Layout(), training=Training(seed=ord(name)))


A, B, C = (experiment(name) for name in "abc")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("remaining", "compared"),
    [((A, B), True), ((A,), False), ((B, C), False), (None, False)],
    ids=["both", "no subject", "no baseline", "no comparison"],
)
def test_only_jobs_with_the_baseline_compare_experiments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: bool,
    remaining: tuple[Experiment, ...] | None,
    compared: bool,
) -> None:
    comparison = Comparison(baseline="a", subjects=("b", "c"), rounds=4, apart=apart) if remaining else None
    jobs: list[Job] = []
    monkeypatch.setattr(Runner, "_launch", lambda self, job: jobs.append(job) or [])
    store: Any = SimpleNamespace(store=SimpleNamespace(root=tmp_path))
    unused: Any = None
    Runner(store, unused, unused, unused, rerun=False)._run(
        Task(experiments=remaining or (A, B), comparison=comparison)
    )
    (job,) = jobs
    assert (job.compare, job.rounds, job.apart) == ((True, 4, apart) if compared else (False, 1, False))


class FinishedLaunch:
    """A launch whose experiments have results immediately."""

    def __init__(self) -> None:
        self.kept_logs: list[Path | None] = []

    def start(self) -> None: ...
    def results(self, index: int) -> list[dict[str, Any]] | None:
        return [{"of": index}]

    def close(self, *, keep_logs: Path | None) -> None:
        self.kept_logs.append(keep_logs)


class PartialLaunch(FinishedLaunch):
    """A launch in which only the first experiment has a result."""

    def results(self, index: int) -> list[dict[str, Any]] | None:
        return None if index else [{"of": 0}]


class RecorderStub:
    """A recorder and a progress display that store their calls."""

    def __init__(self, root: Path):
        self.store = SimpleNamespace(root=root)
        self.printed: list[str] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def begin(self) -> None: ...
    def launch(self, job: Job) -> None: ...
    def tick(self, position: Position) -> None: ...
    def say(self, text: str) -> None:
        self.printed.append(text)

    def outcome(self, experiment: Experiment, spent_s: float, **how: Any) -> None:
        self.outcomes.append((experiment.name, spent_s, how))

    def ratios(self, job: Job, finished: dict[int, Any]) -> None:
        self.outcomes.append(("ratios", sorted(finished)))

    def elsewhere(self, count: int) -> None:
        self.printed.append(f"{count} elsewhere")


def test_interrupt_announces_the_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, stub, interrupt = FinishedLaunch(), RecorderStub(tmp_path), Interrupt()
    printed: list[list[str]] = []

    def watch(launch: Any, *, interrupted: Any, stop_s: Any, tick: Any) -> Ending:
        for interrupt.signal in (0, 0, 2, 2):
            tick(Position(0, 1, Phase.FORWARD, 0, "", "", 0.0), [1.5, 0.0])
            printed.append(list(stub.printed))
        assert (interrupted(), stop_s()) == ("stopped by the user", STOP_TIMEOUT_S)
        return Ending("ok", "", 1, [1.5, 2.5])

    monkeypatch.setattr(supervise, "watch", watch)
    launcher: Any = SimpleNamespace(logs=tmp_path / "logs", launch=lambda job, logs: launched)
    mock: Any = stub
    remaining = Runner(mock, mock, interrupt, launcher, rerun=False)._launch(Job(experiments=[A, B]))
    text = "waiting for the current step and its checkpoint; a second signal ends the run at once"
    assert printed == [[], [], [text], [text]]
    assert stub.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), ("b", 0.0, {"results": [{"of": 1}]})]
    assert (remaining, launched.kept_logs) == ([], [None])


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("outcome", ["hang", "ok"])
def test_failure_is_recorded_for_blamed_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, compare: bool
) -> None:
    launched, stub, logs = PartialLaunch(), RecorderStub(tmp_path), tmp_path / "logs"
    monkeypatch.setattr(supervise, "watch", lambda launch, **_: Ending(outcome, "why", 1, [1.5, 2.5, 0.5]))
    launcher: Any = SimpleNamespace(logs=logs, launch=lambda job, logs: launched)
    mock: Any = stub
    remaining = Runner(mock, mock, Interrupt(), launcher, rerun=False)._launch(
        Job(experiments=[A, B, C], compare=compare)
    )
    failed = {"outcome": "hang", "reason": "why"}
    if outcome == "ok":
        failed = {"outcome": "error", "reason": "the ranks ended without a result"}
    blamed = [("b", 2.5, failed)] + ([("c", 0.5, failed)] if outcome == "ok" else [])
    ratios = [("ratios", [0])] if compare else []
    assert stub.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), *blamed, *ratios]
    assert remaining == ([] if outcome == "ok" else [C])
    assert launched.kept_logs == [logs / B.key]


@pytest.mark.parametrize(
    ("outcome", "index", "finished", "compare", "blamed"),
    [
        ("ok", 2, {0, 1, 2}, False, []),
        ("ok", 2, {0}, False, [1, 2]),
        ("hang", 2, {0, 1, 2}, False, []),
        ("hang", -1, set(), False, [0, 1, 2]),
        ("hang", 0, set(), False, [0]),
        ("hang", 1, {0}, False, [1]),
        ("hang", 0, {0}, False, [1]),
        ("interrupted", 0, set(), False, [0]),
        ("interrupted", 0, {0}, False, [1]),
        ("interrupted", 2, {0}, False, [2]),
        ("interrupted", 2, {2}, False, [0]),
        ("interrupted", 1, set(), True, [0, 1, 2]),
    ],
)
def test_ending_determines_the_blamed_experiments(
    outcome: str, index: int, finished: set[int], compare: bool, blamed: list[int]
) -> None:
    job = Job(experiments=[A, B, C], compare=compare)
    assert runner._blamed_experiments(job, Ending(outcome, "", index, [0.0] * 3), finished) == blamed


def test_locked_experiments_run_last_and_are_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, interrupt = RecorderStub(tmp_path), Interrupt()
    prepared: list[None] = []
    stub.store = SimpleNamespace(root=tmp_path, prepare=lambda: prepared.append(None))
    refusals, order = {A.key: 2, B.key: 0, C.key: 9}, list[str]()

    class SharedLocks:
        locked_keys: list[str] | None = None

        def take(self, keys: list[str]) -> bool:
            refusals[keys[0]] -= 1
            if refusals[keys[0]] >= 0:
                return False
            self.locked_keys = keys
            return True

        def release(self) -> None:
            self.locked_keys = None

    def run(self: Runner, task: Task) -> None:
        assert locks.locked_keys == task.keys
        order.extend(experiment.name for experiment in task.experiments)

    def interrupt_fourth_sleep() -> None:
        interrupt.signal = 2 if len(clock.slept) == 4 else 0

    monkeypatch.setattr(Runner, "_run", run)
    clock = Clock(asleep=interrupt_fourth_sleep).rules(monkeypatch, plan)
    monkeypatch.setattr(
        runner.plan, "missing_tasks", lambda task, store: [] if task.experiments[0] is A else [task]
    )
    locks: Any = SharedLocks()
    mock: Any = stub
    launcher: Any = SimpleNamespace(locks=locks)
    Runner(mock, mock, interrupt, launcher, rerun=False).run([Task(experiments=(e,)) for e in (A, B, C)])
    assert order == ["b"], "the other run finishes a and never unlocks c"
    assert stub.printed == [
        *("0 elsewhere", "waiting for another `repro run` on this store: a, c", "1 elsewhere"),
    ]
    assert clock.slept == [plan.LOCK_RETRY_INTERVAL_S] * 4
    assert (locks.locked_keys, len(prepared)) == (None, 3 + 2 + 2 + 1)
    interrupt.signal = 0
    Runner(mock, mock, interrupt, launcher, rerun=True).run([Task(experiments=(A,))])
    assert order == ["b", "a"], "a rerun includes recorded experiments"
    interrupt.signal = 2
    Runner(mock, mock, interrupt, launcher, rerun=True).run([Task(experiments=(A,))])
    assert order == ["b", "a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_full_disk_errors_differ_from_other_os_errors(tmp_path: Path, number: int) -> None:
    full = number != errno.EACCES

    def raise_error() -> None:
        raise OSError(number, "x", "/store/lock")

    stub = RecorderStub(tmp_path)
    stub.store = SimpleNamespace(root=tmp_path, prepare=raise_error)
    mock: Any = stub
    launcher: Any = SimpleNamespace(locks=None)
    with pytest.raises(DiskFull if full else OSError, match="^disk full: /store/lock$" if full else "x"):
        Runner(mock, mock, Interrupt(), launcher, rerun=False).run([Task(experiments=(A,))])
    launch: Any = SimpleNamespace(start=raise_error, job=Job(experiments=[A, B]), logs=tmp_path)
    if full:
        ending = runner._watch_launch(launch, mock, lambda position, spent_s: None)
        reason = "disk full while starting the ranks: /store/lock"
        assert ending == Ending("error", reason, -1, [0.0, 0.0])
    else:
        with pytest.raises(OSError, match="x"):
            runner._watch_launch(launch, mock, lambda position, spent_s: None)


def test_missing_network_fails_all_experiments_of_the_launch() -> None:
    class RefusedLaunch:
        job = Job(experiments=[A, B])

        def start(self) -> None:
            raise NoNetwork("ip: not permitted")

    launch: Any = RefusedLaunch()
    no_interrupt: Any = None
    ending = runner._watch_launch(launch, no_interrupt, lambda position, spent_s: None)
    assert ending == Ending("error", "ip: not permitted", -1, [0.0, 0.0])
    assert runner._blamed_experiments(launch.job, ending, {}) == [0, 1]
