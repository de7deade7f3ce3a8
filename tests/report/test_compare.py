"""Tests of `repro compare`: differences of speed, memory and outcome between two stores or commits, and noise."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from repro import cli
from repro.config import Experiment
from repro.report import compare
from repro.report.compare import MAX_LAUNCHES, MIN_LAUNCHES, judge_speed, speed_ratio
from repro.results.measured import experiment_record
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from tests.launch.runs import write_suite
from tests.records import made_up
from tests.report import synthetic

CASE = synthetic.experiment("case", dp=2)


def append_launches(
    root: Path,
    e: Experiment = CASE,
    *,
    seconds: float = 1.0,
    outcome: str = "ok",
    commit: str = "",
    memory_factor: float = 1.0,
    launches: int = MIN_LAUNCHES,
) -> None:
    found = synthetic.results(e, seconds) if outcome == "ok" else []
    source = {"git": {"commit": commit}}
    record = experiment_record(e, found, suite="s", provenance=source, wall_s=1.0, outcome=outcome, reason="")
    if "memory.peak_bytes" in record.metrics:
        record.metrics["memory.peak_bytes"] *= memory_factor
    with Store(root) as store:
        for _ in range(launches):
            store.append(record)


def run_compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = cli.main(["compare", *arguments, "--json"])
    changes = json.loads(capsys.readouterr().out)["changes"]
    return code, {change["kind"]: change for change in changes}


@pytest.mark.parametrize(
    ("change", "kind", "judged", "code"),
    [
        ({"seconds": 2.0}, "speed", "worse", 1),
        ({"seconds": 0.5}, "speed", "better", 0),
        ({}, "speed", "same", 0),
        ({"memory_factor": 1.2}, "memory", "worse", 1),
        ({"memory_factor": 0.8}, "memory", "better", 0),
        ({"outcome": "hang"}, "outcome", "worse", 1),
        ({"seconds": 2.0, "launches": MIN_LAUNCHES - 1}, "speed", "not decided", 0),
    ],
)
def test_differences_are_judged(
    tmp_path: Path, capsys: Any, change: dict[str, Any], kind: str, judged: str, code: int
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    append_launches(a)
    append_launches(b, **change)
    found = run_compare(capsys, str(a), str(b))
    assert (found[0], found[1][kind]["judged"]) == (code, judged)
    if kind == "speed":
        assert (found[1][kind]["low"] is None) == (judged == "not decided")


def test_two_commits_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_launches(tmp_path, commit="aaaa1111")
    append_launches(tmp_path, seconds=2.0, commit="bbbb2222")
    code, found = run_compare(capsys, "aaaa", "bbbb", "--results", str(tmp_path))
    assert (code, found["speed"]["judged"]) == (1, "worse")
    assert found["speed"]["low"] <= found["speed"]["ratio"] <= found["speed"]["high"]
    assert cli.main(["compare", "aaaa", "cccc", "--results", str(tmp_path)]) == 2
    assert "aaaa1111, bbbb2222" in capsys.readouterr().err


def test_speed_is_undecided_with_an_interval_wider_than_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for index in range(8):
        append_launches(a, launches=1)
        append_launches(b, seconds=0.8 if index % 2 else 1.25, launches=1)
    code, found = run_compare(capsys, str(a), str(b))
    assert (code, found["speed"]["judged"]) == (0, "not decided")
    assert found["speed"]["low"] < 0.95
    assert found["speed"]["high"] > 1.05
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 not decided" in out
    assert "fewer than 6 runs of A or B" in out


SHORTEST_STEPS_MS = np.fromstring(
    """
    16.0 13.5 12.1 13.2 15.5 12.9 13.2 12.9 13.6 11.7 11.6 12.2 46.7 52.0 48.1 47.9 59.1 13.7 11.3 13.3
    11.4 11.4 12.2 14.8 13.5 12.1 13.8 11.7 11.3 10.7 13.8 12.9 12.1 12.5 12.6 12.8 11.9 12.4 11.6 11.0
    11.0 10.9 11.9 11.4 11.7 10.7 11.5 11.8 14.0 13.1 12.8 11.3 10.6 11.4 12.9 13.9 13.2 12.9 14.4 14.8
    15.1 12.2 13.6 11.6 12.2 11.4 11.9 11.5 11.9 11.1
    """,
    sep=" ",
)
"""Shortest step of each of 70 consecutive launches of one program, on two cores that other programs used as well."""


def alternate_launches(draw: np.random.Generator, count: int, slower: float) -> list[list[ExperimentRecord]]:
    """Return sides A and B of launches in the order A B, B A, ...; B takes `slower` times as long."""
    starts = draw.integers(0, len(SHORTEST_STEPS_MS) - 4, count)
    steps = [step for start in starts for step in SHORTEST_STEPS_MS[start : start + 4]]
    sides = [
        [steps[2 * i + (i + side) % 2] * (slower if side else 1.0) for i in range(count)] for side in (0, 1)
    ]
    return [[made_up("a", series={"step_seconds": [[step, 2 * step]]}) for step in side] for side in sides]


def test_launches_of_one_program_rarely_differ() -> None:
    """95 % intervals contain 1 in 95 of 100 comparisons on average; fewer than 88 have a probability below 0.5 %."""
    draw = np.random.default_rng(1)
    found = [speed_ratio(*alternate_launches(draw, 12, 1.0)) for _ in range(100)]
    assert sum(one is not None and one[1] <= 1 <= one[2] for one in found) >= 88  # type: ignore[operator]


def test_a_15_percent_slower_step_is_detected_under_load() -> None:
    draw = np.random.default_rng(2)

    def compare_launches(slower: float) -> str:
        a, b = alternate_launches(draw, MAX_LAUNCHES, slower)
        ratios = (speed_ratio(a[:count], b[:count]) for count in range(MIN_LAUNCHES, MAX_LAUNCHES + 1))
        decided = (judge_speed(ratio, 0.05) for ratio in ratios if ratio is not None)
        return next((judged for judged in decided if judged != "not decided"), "not decided")

    assert sum(compare_launches(1.15) == "worse" for _ in range(20)) >= 18
    assert sum(compare_launches(1.0) in ("worse", "better") for _ in range(20)) <= 1


def test_two_commits_run_alternately_in_worktrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    trees: set[Path] = set()

    def run_suite(commit: str, tree: Path, suite: Path, store: Path) -> None:
        assert (tree / "repro" / "__init__.py").is_file()
        ran.append(store.name)
        trees.add(tree)
        append_launches(store, seconds=1.0 if store.name == "a" else 2.0, launches=1)

    monkeypatch.setattr(compare, "_run_suite", run_suite)
    suite = write_suite(tmp_path, '[[experiment]]\nname = "one"')
    arguments = ("HEAD~1", "HEAD", "--suite", str(suite), "--results", str(tmp_path / "new"))
    code, found = run_compare(capsys, *arguments)
    assert (code, found["speed"]["judged"]) == (1, "worse")
    assert ran == ["a", "b", "b", "a"] * 3  # six launches decide a factor of two
    assert len(trees) == 2
    assert not any(tree.exists() for tree in trees)
    handler = signal.getsignal(signal.SIGTERM)
    assert cli.main(["compare", "no-such-commit", "HEAD", "--suite", str(suite)]) == 2
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "compare = 'no-such-commit': is not a commit of" in capsys.readouterr().err


@pytest.mark.slow
def test_one_launch_of_a_commit_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, '[[experiment]]\nname = "one"')
    arguments = ("HEAD", "HEAD", "--suite", str(suite), "--results", str(tmp_path), "--launches", "1")
    code, found = run_compare(capsys, *arguments)
    assert (code, found["speed"]["judged"]) == (0, "not decided")


def test_comparison_needs_common_experiments_and_enough_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    append_launches(a)
    append_launches(b, synthetic.experiment("other", dp=4))
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "results with at least one experiment that" in capsys.readouterr().err
    short = made_up("a", series={"step_seconds": [[1.0, 1.0]]})
    assert speed_ratio([short] * 6, [made_up("a")] * 6) is None
    assert cli.main(["compare", str(a), str(a), "--tolerance", "2"]) == 2
