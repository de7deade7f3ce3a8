"""Tests of the progress file of a bundle, which covers all starts of its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro.config import Experiment, Layout, Training
from repro.config.enums import Phase
from repro.config.suites import Comparison
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.rank_process import Position
from repro.launch.slurm.allocation import bundle
from repro.launch.slurm.allocation.bundle import Bundle, BundleProgress
from tests.training import TINY

A, B, C = (Experiment(name=name, model=TINY, layout=Layout(), training=Training(steps=12)) for name in "abc")
TASKS = (Task(experiments=(A,)), Task(experiments=(B, C)))
BUNDLE = Bundle(index=4, tasks=TASKS)


def position_at(index: int, step: int, phase: Phase = Phase.FORWARD) -> Position:
    return Position(index, step, phase, 0, "", "", 0.0)


def test_progress_continues_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle-4.json"

    def fields(*keys: str) -> Any:
        document = json.loads(path.read_text())
        return document[keys[0]] if len(keys) == 1 else tuple(document[key] for key in keys)

    first = BundleProgress(tmp_path, BUNDLE, "12_3", 0)
    assert fields("job", "restarts", "nodes", "phase", "ended") == ("12_3", 0, [], "starting", [])
    assert (first.open, first.remaining(TASKS)) == (3, list(TASKS))
    first.set_nodes(["n1", "n2"])
    assert fields("nodes", "phase", "current") == (["n1", "n2"], "running", None)
    first.launch(Job(experiments=[A]))
    start = {"names": ["a"], "case": "a", "compare": False, "step": 0, "steps": 12, "phase": "start"}
    assert fields("current") == {**start, "steps_per_s": None}
    first.tick(position_at(0, 0, Phase.START))
    assert fields("current")["phase"] == "start", "no step has begun"
    first.tick(position_at(0, 1))
    assert (fields("current")["step"], fields("current")["phase"]) == (1, "forward")
    first.tick(position_at(0, 2))
    assert fields("current")["step"] == 1, "the write interval has not passed"
    monkeypatch.setattr(bundle, "WRITE_INTERVAL_S", 0.0)
    first.tick(position_at(0, 3))
    assert fields("current")["step"] == 3
    first.ended("a", "hang", "rank 1", 1.0, expected=False)
    first.launch(Job(experiments=[B, C], compare=True))
    first.tick(position_at(1, 5))
    current = fields("current")
    assert (current["names"], current["case"], current["compare"]) == (["b", "c"], "c", True)
    first.ended("b", "interrupted", "preempted", 1.0, expected=False)
    assert first.open == 2, "an interrupted case is still open"
    first.end(signal="SIGUSR2", reason="preempted")
    assert fields("phase", "current") == ("stopped", None)
    assert fields("stopped") == {"signal": "SIGUSR2", "reason": "preempted"}
    assert first.count_outcomes() == {"hang": 1, "interrupted": 1}

    second = BundleProgress(tmp_path, BUNDLE, "12_3", 1)
    ended = [{"name": "a", "outcome": "hang", "reason": "rank 1"}]
    assert fields("restarts", "stopped", "ended") == (1, None, ended)
    assert (second.open, second.total, second.known) == (2, 2, 1)
    assert second.remaining(TASKS) == [TASKS[1]]
    for name in ("b", "c"):
        second.ended(name, "ok", "", 1.0, expected=True)
    second.end()
    assert (second.open, fields("phase", "stopped")) == (0, ("ended", None))
    assert second.count_outcomes() == {"hang": 1, "ok": 2}


def test_ended_cases_are_not_repeated() -> None:
    compared = Task(experiments=(A, B, C), comparison=Comparison(baseline="a", subjects=("b", "c"), rounds=2))

    def remaining(ended: dict[str, str], task: Task = compared) -> list[tuple[str, bool]]:
        rest = bundle._remaining_tasks(task, ended)
        return [("".join(e.name for e in t.experiments), t.comparison is not None) for t in rest]

    assert remaining({}) == [("abc", True)]
    assert remaining({"b": "error"}) == [("ac", True)]
    assert remaining({"a": "ok", "b": "ok"}) == [("ac", True)], "a comparison repeats its baseline"
    assert remaining({"a": "oom"}) == [("bc", False)]
    assert remaining({"a": "ok", "b": "ok", "c": "hang"}) == []
    assert remaining({"a": "hang"}, Task(experiments=(A, B))) == [("b", False)]
