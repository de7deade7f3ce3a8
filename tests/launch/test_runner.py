"""What the runner asks of a launch: who takes turns, and what becomes of one that does not start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.lab.network import NoNetwork
from repro.launch import runner, supervise
from repro.launch.beacon import Position
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.runner import Runner
from repro.launch.supervise import Ending
from repro.suites import Comparison
from tests.training import TINY


def experiment(name: str) -> Experiment:
    return Experiment(name=name, model=TINY, layout=Layout())


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


class Told:
    """A recorder and its progress, that note what they are told."""

    def __init__(self, root: Path):
        self.store = SimpleNamespace(root=root)
        self.said: list[str] = []
        self.outcomes: list[tuple[Any, ...]] = []

    def begin(self) -> None: ...
    def launch(self, job: Job) -> None: ...
    def tick(self, position: Position) -> None: ...
    def say(self, text: str) -> None:
        self.said.append(text)

    def outcome(self, experiment: Experiment, spent_s: float, **how: Any) -> None:
        self.outcomes.append((experiment.name, spent_s, how))


def test_only_who_interrupts_is_told_and_once_that_a_checkpoint_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, told, interrupt = Watched(), Told(tmp_path), Interrupt()
    before: list[list[str]] = []

    def watch(launch: Any, *, interrupted: Any, stop_s: Any, tick: Any) -> Ending:
        for interrupt.signal in (0, 0, 2, 2):
            tick(Position(0, 1, Phase.FORWARD, 0, "", "", 0.0), [1.5, 0.0])
            before.append(list(told.said))
        assert (interrupted(), stop_s()) == ("stopped by the user", Interrupt.STOP_S)
        return Ending("ok", "", 1, [1.5, 2.5])

    monkeypatch.setattr(supervise, "watch", watch)
    launcher: Any = SimpleNamespace(logs=tmp_path / "logs", launch=lambda job, logs: launched)
    anyone: Any = told
    left = Runner(anyone, anyone, interrupt, launcher, rerun=False)._launch(Job(experiments=[A, B]))
    text = "waiting for the step and its checkpoint; a second signal ends it at once"
    assert before == [[], [], [text], [text]]
    assert told.outcomes == [("a", 1.5, {"results": [{"of": 0}]}), ("b", 0.0, {"results": [{"of": 1}]})]
    assert (left, launched.kept) == ([], [None])


def test_without_its_network_nothing_starts_and_all_are_told_why() -> None:
    class Refused:
        job = Job(experiments=[A, B])

        def start(self) -> None:
            raise NoNetwork("ip: not permitted")

    launch: Any = Refused()
    nobody: Any = None
    ending = runner._watched(launch, nobody, lambda position, spent_s: None)
    assert (ending.outcome, ending.reason, ending.spent_s) == ("error", "ip: not permitted", [0.0, 0.0])
    assert runner._blamed(launch.job, ending, {}) == [0, 1]
