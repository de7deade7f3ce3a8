"""Tests of the progress display, as bars on a terminal or as lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from repro.config import Experiment, Layout, Training
from repro.config.enums import Phase
from repro.launch import progress
from repro.launch.job import Job
from repro.launch.progress import JobStepCounters
from repro.launch.rank_process import Position
from tests.clock import Clock
from tests.training import TINY


def job(*names: str, **keys: Any) -> Job:
    training = Training(steps=12, untimed_steps=2)
    experiments = [Experiment(name=name, model=TINY, layout=Layout(), training=training) for name in names]
    return Job(experiments=experiments, **keys)


def position_at(experiment: int, step: int, phase: Phase = Phase.FORWARD) -> Position:
    return Position(experiment, step, phase, 0, "", "", 0.0)


@pytest.mark.parametrize(
    ("times", "done", "rate"),
    [
        ({0: 50.0, 1: 90.0, 2: 92.0, 3: 94.0}, 3, 0.5),
        ({8: 1.0, 9: 2.0, 10: 6.0}, 10, 0.25),  # a resumed run
    ],
)
def test_rate_excludes_start_up_and_the_first_step(times: dict[int, float], done: int, rate: float) -> None:
    clock = Clock()
    counters = JobStepCounters(job("a"), clock.monotonic)
    for step, clock.now in times.items():
        steps = counters.update(position_at(0, step))
    assert (steps.done, steps.total, steps.rate) == (done, 12, pytest.approx(rate))
    assert counters.left_s(steps) == pytest.approx((12 - done) / rate)


def test_compared_experiments_have_separate_rates_and_common_time_left() -> None:
    clock = Clock()
    counters = JobStepCounters(job("a", "b", compare=True, rounds=2), clock.monotonic)
    positions = ((0, 0, 0.0), (0, 1, 1.0), (1, 0, 1.0), (1, 1, 4.0), (0, 2, 5.0), (0, 3, 6.0), (1, 2, 9.0))
    for experiment, step, clock.now in positions:
        steps = counters.update(position_at(experiment, step))
    a, b = counters.steps
    assert (a.rate, b.rate) == (pytest.approx(1.0), pytest.approx(1 / 3))
    assert counters.left_s(steps) == counters.left_s(a) == pytest.approx(9 * 1 + 10 * 3)
    counters = JobStepCounters(job("a", "b", compare=True, rounds=2, apart=True))
    for step in (0, 7, 0, 7):
        steps = counters.update(position_at(0, step))
    assert (steps.done, steps.total) == (14, 14), "separate turns repeat the untimed steps"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0).rules(monkeypatch, progress)
    monkeypatch.setattr(progress, "JobStepCounters", lambda job: JobStepCounters(job, clock.monotonic))
    return clock


def test_lines_show_progress_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Progress(total=12, known=2) as display:
        display.launch(job("a"))
        times = {1003.0: 0, 1004.0: 1, 1008.0: 2, 1010.0: 2, 1016.0: 4, 1026.0: 6, 1026.5: 6}
        for clock.now, step in times.items():
            display.tick(position_at(0, step))
            display.tick(position_at(0, step, Phase.START))
        clock.now = 1121.0
        display.tick(position_at(0, 12, Phase.DONE))
        display.ended("a", "oom", "too large", 75.0, expected=False)
        display.elsewhere(1)
        display.launch(job("b", "c", compare=True))
        display.ended("b", "ok", "", 1.0, expected=True)
        clock.now = 1137.0
        display.ended("c", "ok", "", 1.0, expected=True)
    assert capsys.readouterr().err.splitlines() == [
        "2 experiments already have a record, 12 to run",
        "  a: step 4 of 12, forward, 4 s/step, 0:00:32 left (12 left, 0:16 elapsed)",
        "  a: step 6 of 12, forward, 4.5 s/step, 0:00:27 left (12 left, 0:26 elapsed)",
        "a: unexpected outcome oom after 75 s: too large",
        "  4 of 12 experiments (8 left, 2:17 elapsed)",
    ]


LONG = "second-and-more-letters-than-a-line-of-eighty-columns-has-room-for-beside-the-rest"
LABELS = {80: "second-and-more-lette…", 140: LONG}


@pytest.mark.parametrize("width", LABELS)
def test_terminal_shows_active_experiments(clock: Clock, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "stderr", lambda: console)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def drawn() -> list[str]:
        assert display._bars is not None
        page = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        with page.capture() as text:
            page.print(display._bars.get_renderable())
        found = [line.rstrip() for line in text.get().splitlines() if line.strip()]
        assert max(map(len, found)) <= width
        return [" ".join(line.split()) for line in found]

    with progress.Progress(total=3, known=0) as display:
        display.launch(job("first", LONG, compare=True, rounds=2))
        starts = "━━━━━━━━━━━━ 0/? starting"
        assert drawn() == ["all 0/3 experiments", f"first {starts}", f"{LABELS[width]} {starts}"]
        for clock.now, experiment, step in (
            *((1000.0, 0, 0), (1001.0, 0, 1), (1001.5, 0, 2)),
            *((1002.0, 1, 0), (1003.0, 1, 1), (1007.0, 1, 2)),
        ):
            display.tick(position_at(experiment, step))
        left = "0:00:45 left"  # 10 steps of 0.5 s and 10 steps of 4 s
        second = f"{LABELS[width]} ━━ 2/12 forward 4 s/step {left}"
        assert drawn() == ["all 0/3 experiments", f"first ━━ 2/12 forward 2 steps/s {left}", second]
        display.ended("first", "ok", "", 1.0, expected=True)
        assert drawn() == ["all ━━━━ 1/3 experiments", second]
        display.tick(position_at(0, 12, Phase.DONE))
        assert drawn() == ["all ━━━━ 1/3 experiments", second]
        display.elsewhere(1)
        assert drawn() == ["all ━━━━━━━━ 2/3 experiments", second]
        display.launch(job("alone", "later"))
        assert [line.split()[0] for line in drawn()] == ["all", "alone"]
        display.tick(position_at(1, 0))
        assert [line.split()[0] for line in drawn()] == ["all", "later"]
