"""What the runner asks of a launch: who takes turns, and what becomes of one that does not start."""

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
    ("there", "compared"),
    [((A, B), True), ((A,), False), ((B, C), False), (None, False)],
    ids=["both", "nobody to compare", "no baseline", "no comparison"],
)
def test_turns_are_taken_beside_the_baseline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: bool,
    there: tuple[Experiment, ...] | None,
    compared: bool,
) -> None:
    comparison = Comparison(baseline="a", subjects=("b", "c"), rounds=4, apart=apart) if there else None
    jobs: list[Job] = []
    monkeypatch.setattr(Runner, "_launch", lambda self, job: jobs.append(job) or [])
    store: Any = SimpleNamespace(store=SimpleNamespace(root=tmp_path))
    anything: Any = None
    Runner(store, anything, anything, anything, rerun=False)._run(
        Task(experiments=there or (A, B), comparison=comparison)
    )
    (job,) = jobs
    assert (job.compare, job.rounds, job.apart) == ((True, 4, apart) if compared else (False, 1, False))


class Watched:
    """A launch whose experiments have their results at once."""

    def __init__(self) -> None:
        self.kept: list[Path | None] = []

    def start(self) -> None: ...
    def results(self, index: int) -> list[dict[str, Any]] | None:
        return [{"of": index}]

    def close(self, *, keep_logs: Path | None) -> None:
        self.kept.append(keep_logs)


class Failing(Watched):
    """Of its experiments the first alone has a result."""

    def results(self, index: int) -> list[dict[str, Any]] | None:
        return None if index else [{"of": 0}]


class Told:
    """A recorder and its progress, that note what they are told."""

    def __init__(self, root: Path):
        self.store = SimpleNamespace(root=root)
        self.message: list[str] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def begin(self) -> None: ...
    def launch(self, job: Job) -> None: ...
    def tick(self, position: Position) -> None: ...
    def say(self, text: str) -> None:
        self.message.append(text)

    def outcome(self, experiment: Experiment, spent_s: float, **how: Any) -> None:
        self.outcomes.append((experiment.name, spent_s, how))

    def ratios(self, job: Job, finished: dict[int, Any]) -> None:
        self.outcomes.append(("ratios", sorted(finished)))

    def elsewhere(self, count: int) -> None:
        self.message.append(f"{count} elsewhere")


def test_only_who_interrupts_is_told_and_once_that_a_checkpoint_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, told, interrupt = Watched(), Told(tmp_path), Interrupt()
    before: list[list[str]] = []

    def watch(launch: Any, *, interrupted: Any, stop_s: Any, tick: Any) -> Ending:
        for interrupt.signal in (0, 0, 2, 2):
            tick(Position(0, 1, Phase.FORWARD, 0, "", "", 0.0), [1.5, 0.0])
            before.append(list(told.message))
        assert (interrupted(), stop_s()) == ("stopped by the user", STOP_TIMEOUT_S)
        return Ending("ok", "", 1, [1.5, 2.5])

    monkeypatch.setattr(supervise, "watch", watch)
    launcher: Any = SimpleNamespace(logs=tmp_path / "logs", launch=lambda job, logs: launched)
    anyone: Any = told
    left = Runner(anyone, anyone, interrupt, launcher, rerun=False)._launch(Job(experiments=[A, B]))
    text = "waiting for the current step and its checkpoint; a second signal ends the run at once"
    assert before == [[], [], [text], [text]]
    assert told.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), ("b", 0.0, {"results": [{"of": 1}]})]
    assert (left, launched.kept) == ([], [None])


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("outcome", ["hang", "ok"])
def test_a_failure_is_put_down_to_whom_it_was_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, compare: bool
) -> None:
    launched, told, logs = Failing(), Told(tmp_path), tmp_path / "logs"
    monkeypatch.setattr(supervise, "watch", lambda launch, **_: Ending(outcome, "why", 1, [1.5, 2.5, 0.5]))
    launcher: Any = SimpleNamespace(logs=logs, launch=lambda job, logs: launched)
    anyone: Any = told
    left = Runner(anyone, anyone, Interrupt(), launcher, rerun=False)._launch(
        Job(experiments=[A, B, C], compare=compare)
    )
    failed = {"outcome": "hang", "reason": "why"}
    if outcome == "ok":
        failed = {"outcome": "error", "reason": "the ranks ended without a result"}
    blamed = [("b", 2.5, failed)] + ([("c", 0.5, failed)] if outcome == "ok" else [])
    ratios = [("ratios", [0])] if compare else []
    assert told.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), *blamed, *ratios]
    assert left == ([] if outcome == "ok" else [C])
    assert launched.kept == [logs / B.key]


@pytest.mark.parametrize(
    ("outcome", "at", "finished", "compare", "blamed"),
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
def test_who_is_blamed(outcome: str, at: int, finished: set[int], compare: bool, blamed: list[int]) -> None:
    job = Job(experiments=[A, B, C], compare=compare)
    assert runner._blamed_experiments(job, Ending(outcome, "", at, [0.0] * 3), finished) == blamed


def test_what_another_run_is_at_comes_last_and_that_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, interrupt = Told(tmp_path), Interrupt()
    prepared: list[None] = []
    told.store = SimpleNamespace(root=tmp_path, prepare=lambda: prepared.append(None))
    refusals, order = {A.key: 2, B.key: 0, C.key: 9}, list[str]()

    class Shared:
        held: list[str] | None = None

        def take(self, keys: list[str]) -> bool:
            refusals[keys[0]] -= 1
            if refusals[keys[0]] >= 0:
                return False
            self.held = keys
            return True

        def release(self) -> None:
            self.held = None

    def run(self: Runner, task: Task) -> None:
        assert shared.held == task.keys
        order.extend(experiment.name for experiment in task.experiments)

    def asleep() -> None:
        interrupt.signal = 2 if len(clock.slept) == 4 else 0

    monkeypatch.setattr(Runner, "_run", run)
    clock = Clock(asleep=asleep).rules(monkeypatch, plan)
    monkeypatch.setattr(
        runner.plan, "missing_tasks", lambda task, store: [] if task.experiments[0] is A else [task]
    )
    shared: Any = Shared()
    anyone: Any = told
    launcher: Any = SimpleNamespace(locks=shared)
    Runner(anyone, anyone, interrupt, launcher, rerun=False).run([Task(experiments=(e,)) for e in (A, B, C)])
    assert order == ["b"], "the first was done by the other one meanwhile, the last never was let go of"
    assert told.message == [
        *("0 elsewhere", "waiting for another `repro run` on this store: a, c", "1 elsewhere"),
    ]
    assert clock.slept == [plan.LOCK_RETRY_INTERVAL_S] * 4
    assert (shared.held, len(prepared)) == (None, 3 + 2 + 2 + 1)
    interrupt.signal = 0
    Runner(anyone, anyone, interrupt, launcher, rerun=True).run([Task(experiments=(A,))])
    assert order == ["b", "a"], "what is to run again does"
    interrupt.signal = 2
    Runner(anyone, anyone, interrupt, launcher, rerun=True).run([Task(experiments=(A,))])
    assert order == ["b", "a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_ends_a_run_and_is_told_from_other_faults(tmp_path: Path, number: int) -> None:
    full = number != errno.EACCES

    def fails() -> None:
        raise OSError(number, "x", "/store/lock")

    told = Told(tmp_path)
    told.store = SimpleNamespace(root=tmp_path, prepare=fails)
    anyone: Any = told
    launcher: Any = SimpleNamespace(locks=None)
    with pytest.raises(DiskFull if full else OSError, match="^disk full: /store/lock$" if full else "x"):
        Runner(anyone, anyone, Interrupt(), launcher, rerun=False).run([Task(experiments=(A,))])
    launch: Any = SimpleNamespace(start=fails, job=Job(experiments=[A, B]), logs=tmp_path)
    if full:
        ending = runner._watch_launch(launch, anyone, lambda position, spent_s: None)
        reason = "disk full while starting the ranks: /store/lock"
        assert ending == Ending("error", reason, -1, [0.0, 0.0])
    else:
        with pytest.raises(OSError, match="x"):
            runner._watch_launch(launch, anyone, lambda position, spent_s: None)


def test_without_its_network_nothing_starts_and_all_are_told_why() -> None:
    class Refused:
        job = Job(experiments=[A, B])

        def start(self) -> None:
            raise NoNetwork("ip: not permitted")

    launch: Any = Refused()
    nobody: Any = None
    ending = runner._watch_launch(launch, nobody, lambda position, spent_s: None)
    assert ending == Ending("error", "ip: not permitted", -1, [0.0, 0.0])
    assert runner._blamed_experiments(launch.job, ending, {}) == [0, 1]
