"""What the runner asks of a launch: who takes turns, and what becomes of one that does not start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Experiment, Layout
from repro.lab.network import NoNetwork
from repro.launch import runner
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.runner import Runner
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
