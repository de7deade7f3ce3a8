"""Tests of the runner, which launches and blames experiments, and of the recorder, which summarises a run."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from repro.config import Experiment, Layout, Training, suites
from repro.config.enums import Phase
from repro.config.suites import Comparison
from repro.emulate.network import NoNetwork
from repro.launch import plan, runner, supervise
from repro.launch.job import STOP_TIMEOUT_S, Interrupt, Job
from repro.launch.plan import Task
from repro.launch.rank_process import Position
from repro.launch.recorder import DiskFull, Recorder, run_end, summarise_run
from repro.launch.runner import Runner
from repro.launch.supervise import Ending
from repro.results.schema import ComparisonRecord, Side
from repro.results.store import Store
from tests.clock import Clock
from tests.launch.runs import experiments, write_suite
from tests.records import made_up
from tests.training import TINY

A, B, C = (
    Experiment(name=name, model=TINY, layout=Layout(), training=Training(seed=ord(name))) for name in "abc"
)


class RecorderStub:
    """A recorder, its store, and a progress display that record their calls."""

    def __init__(self, root: Path):
        self.root, self.store, self.interrupt = root, self, Interrupt()
        self.printed: list[str] = []
        self.outcomes: list[tuple[Any, ...]] = []
        self.say, self.prepare = self.printed.append, Mock()
        self.begin = self.launch = self.tick = Mock()

    def outcome(self, experiment: Experiment, spent_s: float, **how: Any) -> None:
        self.outcomes.append((experiment.name, spent_s, how))

    def ratios(self, job: Job, finished: dict[int, Any]) -> None:
        self.outcomes.append(("ratios", sorted(finished)))

    def elsewhere(self, count: int) -> None:
        self.printed.append(f"{count} elsewhere")


def launch_stub(finished: int) -> Mock:
    """Return a launch whose first `finished` experiments have results immediately."""
    return Mock(results=lambda index: [{"of": index}] if index < finished else None)


@pytest.fixture
def stub(tmp_path: Path) -> RecorderStub:
    return RecorderStub(tmp_path)


def runner_of(stub: Any, launched: Any = None, locks: Any = None, rerun: bool = False) -> Runner:
    """Return a runner whose launcher returns `launched` for every job."""
    launcher: Any = SimpleNamespace(logs=stub.root / "logs", launch=lambda job, logs: launched, locks=locks)
    return Runner(stub, stub, stub.interrupt, launcher, rerun=rerun)


COMPARISON = Comparison(baseline="a", subjects=("b", "c"), rounds=4)
APART = replace(COMPARISON, apart=True)


def test_comparison_needs_baseline_and_subject(stub: RecorderStub, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(Runner, "_launch", lambda self, job: jobs.append(job) or [])
    tasks = [((A, B), COMPARISON), ((A, B), APART), ((A,), APART), ((B, C), APART), ((A, B), None)]
    for remaining, comparison in tasks:
        runner_of(stub)._run(Task(experiments=remaining, comparison=comparison))
    compared, separate = (True, 4, False), (True, 4, True)
    found = [(job.compare, job.rounds, job.apart) for job in jobs]
    assert found == [compared, separate, *[(False, 1, False)] * 3]


def test_interrupt_announces_the_checkpoint_once(stub: RecorderStub, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, interrupt = launch_stub(finished=2), stub.interrupt
    printed: list[list[str]] = []

    def watch(launch: Any, *, interrupted: Any, stop_s: Any, tick: Any) -> Ending:
        for interrupt.signal in (0, 0, 2, 2):
            tick(Position(0, 1, Phase.FORWARD, 0, "", "", 0.0), [1.5, 0.0])
            printed.append(list(stub.printed))
        assert (interrupted(), stop_s()) == ("stopped by the user", STOP_TIMEOUT_S)
        return Ending("ok", "", 1, [1.5, 2.5])

    monkeypatch.setattr(supervise, "watch", watch)
    remaining = runner_of(stub, launched)._launch(Job(experiments=[A, B]))
    text = "waiting for the current step and its checkpoint; a second signal ends the run at once"
    assert printed == [[], [], [text], [text]]
    assert stub.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), ("b", 0.0, {"results": [{"of": 1}]})]
    assert (remaining, launched.close.call_args_list) == ([], [call(keep_logs=None)])


@pytest.mark.parametrize(("outcome", "compare"), [("hang", False), ("hang", True), ("ok", True)])
def test_failure_is_recorded_for_blamed_experiments(
    stub: RecorderStub, monkeypatch: pytest.MonkeyPatch, outcome: str, compare: bool
) -> None:
    launched = launch_stub(finished=1)
    monkeypatch.setattr(supervise, "watch", lambda launch, **_: Ending(outcome, "why", 1, [1.5, 2.5, 0.5]))
    remaining = runner_of(stub, launched)._launch(Job(experiments=[A, B, C], compare=compare))
    failed = {"outcome": "hang", "reason": "why"}
    if outcome == "ok":
        failed = {"outcome": "error", "reason": "the ranks ended without a result"}
    blamed = [("b", 2.5, failed)] + ([("c", 0.5, failed)] if outcome == "ok" else [])
    ratios = [("ratios", [0])] if compare else []
    assert stub.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), *blamed, *ratios]
    assert remaining == ([] if outcome == "ok" else [C])
    launched.close.assert_called_once_with(keep_logs=stub.root / "logs" / B.key)


def test_ending_determines_the_blamed_experiments() -> None:
    for outcome, index, finished, compare, blamed in (
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
    ):
        job, ending = Job(experiments=[A, B, C], compare=compare), Ending(outcome, "", index, [0.0] * 3)
        assert runner._blamed_experiments(job, ending, finished) == blamed, (ending, finished)


def test_locked_experiments_run_last(stub: RecorderStub, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = stub.interrupt
    refusals, order, locked = {A.key: 2, B.key: 0, C.key: 9}, list[str](), list[str]()

    def take(keys: list[str]) -> bool:
        refusals[keys[0]] -= 1
        locked.extend(keys if refusals[keys[0]] < 0 else [])
        return refusals[keys[0]] < 0

    def run(self: Runner, task: Task) -> None:
        assert locked == task.keys
        order.extend(experiment.name for experiment in task.experiments)

    def interrupt_fourth_sleep() -> None:
        interrupt.signal = 2 if len(clock.slept) == 4 else 0

    monkeypatch.setattr(Runner, "_run", run)
    clock = Clock(asleep=interrupt_fourth_sleep).rules(monkeypatch, plan)
    monkeypatch.setattr(
        runner.plan, "missing_tasks", lambda task, store: [] if task.experiments[0] is A else [task]
    )
    locks = SimpleNamespace(take=take, release=locked.clear)
    tasks = [Task(experiments=(e,)) for e in (A, B, C)]
    runner_of(stub, locks=locks).run(tasks)
    assert order == ["b"], "the other run finishes a and never unlocks c"
    waiting = "waiting for another `repro run` on this store: a, c"
    assert stub.printed == ["0 elsewhere", waiting, "1 elsewhere"]
    assert clock.slept == [plan.LOCK_RETRY_INTERVAL_S] * 4
    assert (locked, stub.prepare.call_count) == ([], 3 + 2 + 2 + 1)
    rerunner = runner_of(stub, locks=locks, rerun=True)
    rerunner.run(tasks[:1])
    assert order == ["b"], "an interrupted runner starts nothing"
    interrupt.signal = 0
    rerunner.run(tasks[:1])
    assert order == ["b", "a"], "a rerun includes recorded experiments"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_an_error_that_names_the_file(stub: RecorderStub, number: int) -> None:
    fail = stub.prepare = Mock(side_effect=OSError(number, "x", "/store/lock"))
    with pytest.raises(DiskFull, match=r"^disk full: /store/lock$"):
        runner_of(stub).run([Task(experiments=(A,))])
    recorder: Any = SimpleNamespace(store=SimpleNamespace(append=fail, folder="/store"))
    for message in ("out of memory, and the outcome of a did not fit", ""):
        with pytest.raises(DiskFull, match=f"^{message or 'disk full: /store'}$"):
            Recorder._append(recorder, made_up("a"), message)
    fail.side_effect = OSError(errno.EACCES, "x")
    with pytest.raises(OSError, match="x"):
        Recorder._append(recorder, made_up("a"))


def test_ranks_that_cannot_start_fail_all_experiments_of_the_launch() -> None:
    def watch(error: Exception) -> Ending:
        launch = Mock(job=Job(experiments=[A, B]))
        launch.start.side_effect = error
        return runner._watch_launch(launch, Interrupt(), lambda position, spent_s: None)

    for error, reason in (
        (OSError(errno.ENOSPC, "x", "/store/lock"), "disk full while starting the ranks: /store/lock"),
        (NoNetwork("ip: not permitted"), "ip: not permitted"),
    ):
        assert watch(error) == Ending("error", reason, -1, [0.0, 0.0])
    with pytest.raises(OSError, match="x"):
        watch(OSError(errno.EACCES, "x"))


def test_summary_has_a_row_for_every_selected_experiment(tmp_path: Path) -> None:
    """The experiments have expected, unexpected or no outcomes, or need another machine."""
    anything = experiments("any", extra='expect = ""\ntraining.lr = 0.5\n')
    suite = suites.load_suite(write_suite(tmp_path, experiments("ok", "hung", "new", "far") + anything))
    keys = {entry.experiment.name: entry.experiment.key for entry in suite.entries}
    with Store(tmp_path / "results") as store:
        for name, outcome, reason in (("ok", "ok", ""), ("hung", "hang", "rank 1"), ("any", "oom", "much")):
            store.append(made_up(name, key=keys[name], outcome=outcome, reason=reason))
            (store.root / "logs" / keys[name]).mkdir(parents=True)
        baseline, subject = (Side(name=name, key=keys[name]) for name in ("ok", "any"))
        numbers = {"metric": "samples_per_s", "ratio": 2.0, "low": 1.5, "high": 2.5, "rounds": 5}
        store.append(ComparisonRecord(suite="s", name="x", baseline=baseline, subject=subject, **numbers))
        entries, needs = list(suite.entries), dict.fromkeys(keys, "")
        summary = summarise_run(suite, entries, store, {"ok"}, needs | {"far": "a GPU"})
        without = [entry for entry in entries if entry.experiment.name != "any"]
        assert summarise_run(suite, without, store, set(), needs)["comparisons"] == []
        traced = summarise_run(suite, entries, store, set(), needs, "simulated")
    rows = {row["name"]: row for row in summary["experiments"]}
    assert {name: (row["outcome"], row["expected"], row["reason"]) for name, row in rows.items()} == {
        "ok": ("ok", True, ""),
        "hung": ("hang", False, "rank 1"),
        "new": ("not run", False, ""),
        "far": ("not run", None, "needs a GPU"),
        "any": ("oom", None, "much"),
    }
    assert [name for name, row in rows.items() if not row["already_known"]] == ["ok"]
    assert {name for name, row in rows.items() if row["logs"]} == {"hung"}
    assert summary["counts"] == {"ok": 1, "hang": 1, "not run": 2, "oom": 1}
    assert summary["comparisons"] == [{"subject": "any", "baseline": "ok", **numbers}]
    assert (traced["counts"], traced["comparisons"]) == ({"not run": 5}, [])


def test_exit_code_of_a_run() -> None:
    for expected, failure, number, stopped, code in (
        (None, "", 0, "", 0),
        (False, "", 0, "", 1),
        (True, "disk full", 0, "disk full", 1),
        (True, "", 15, "by signal 15", 143),
        (False, "disk full", 2, "disk full", 130),
    ):
        rows = [{"expected": True}, {"expected": expected}]
        end = run_end({"experiments": rows}, failure=failure, signal=number)
        assert (end.summary["stopped"], end.code) == (stopped, code)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Let Python interrupt at each of `SIGNALS`, and restore the handlers at the end."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_sets_the_stop_timeout_to_zero(handlers: None, number: int) -> None:
    with Interrupt() as interrupt:
        assert (bool(interrupt), interrupt.reason, interrupt.stop_s) == (False, "", STOP_TIMEOUT_S)
        os.kill(os.getpid(), number)
        assert (interrupt.signal, interrupt.reason) == (number, "stopped by the user")
        assert interrupt.stop_s == STOP_TIMEOUT_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupt.signal, interrupt.again, interrupt.stop_s) == (number, True, 0.0)
    assert all(signal.getsignal(one) is signal.default_int_handler for one in SIGNALS)


def test_ignored_signals_remain_ignored(handlers: None) -> None:
    """`nohup repro run` continues after its terminal closes, and SIGTERM still stops the run."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
