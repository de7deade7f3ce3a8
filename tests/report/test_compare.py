"""Two stores side by side: what is slower, larger, failed or judged otherwise, and what is noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.config import Experiment
from repro.report import compare
from repro.report.compare import speed_ratio
from repro.results.measured import experiment_record
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from tests.launch.runs import write_suite
from tests.records import made_up
from tests.report import synthetic


def written(
    root: Path,
    e: Experiment,
    *,
    seconds: float = 1.0,
    outcome: str = "ok",
    commit: str = "",
    grown: float = 1.0,
    launches: int = 3,
) -> ExperimentRecord:
    found = synthetic.results(e, seconds) if outcome == "ok" else []
    source = {"git": {"commit": commit}}
    record = experiment_record(e, found, suite="s", provenance=source, wall_s=1.0, outcome=outcome, reason="")
    if "memory.peak_bytes" in record.metrics:
        record.metrics["memory.peak_bytes"] *= grown
    with Store(root) as store:
        for _ in range(launches):
            store.append(record)
    return record


@pytest.fixture
def e() -> Experiment:
    return synthetic.experiment("case", dp=2)


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = cli.main(["compare", *arguments, "--json"])
    changes = json.loads(capsys.readouterr().out)["changes"]
    return code, {change["kind"]: change for change in changes}


@pytest.mark.parametrize(
    ("change", "kind", "judged", "code"),
    [
        ({"seconds": 2.0}, "speed", "worse", 1),
        ({"seconds": 0.5}, "speed", "better", 0),
        ({}, "speed", "same", 0),
        ({"grown": 1.2}, "memory", "worse", 1),
        ({"grown": 0.8}, "memory", "better", 0),
        ({"outcome": "hang"}, "outcome", "worse", 1),
    ],
)
def test_what_changed_is_judged(
    tmp_path: Path,
    e: Experiment,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    kind: str,
    judged: str,
    code: int,
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    written(a, e)
    written(b, e, **change)
    found = compared(capsys, str(a), str(b))
    assert (found[0], found[1][kind]["judged"]) == (code, judged)


def test_two_commits_of_one_store(tmp_path: Path, e: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, e, commit="aaaa1111")
    written(tmp_path, e, seconds=2.0, commit="bbbb2222")
    code, found = compared(capsys, "aaaa", "bbbb", "--results", str(tmp_path))
    assert (code, found["speed"]["judged"]) == (1, "worse")
    assert found["speed"]["low"] <= found["speed"]["ratio"] <= found["speed"]["high"]
    assert cli.main(["compare", "aaaa", "cccc", "--results", str(tmp_path)]) == 2
    assert "aaaa1111, bbbb2222" in capsys.readouterr().err


@pytest.mark.parametrize("launches", [1, 2])
def test_few_launches_decide_no_speed(
    tmp_path: Path, e: Experiment, capsys: pytest.CaptureFixture[str], launches: int
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    written(a, e)
    written(b, e, seconds=2.0, launches=launches)
    code, found = compared(capsys, str(a), str(b))
    assert (code, found["speed"]["judged"], found["speed"]["low"]) == (0, "not decided", None)
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 not decided" in out
    assert "--launches 3` runs them in turns" in out


def launched(draw: Any, count: int, seconds: float, between: float) -> list[ExperimentRecord]:
    """Launches that differ from each other by more than their steps do."""
    return [
        made_up("a", series={"step_seconds": [list(factor * draw.lognormal(0, 0.03, 20))]})
        for factor in seconds * draw.lognormal(0, between, count)
    ]


@pytest.mark.parametrize("launches", [3, 5])
def test_launches_of_the_same_program_are_rarely_apart(launches: int) -> None:
    """Of 200 comparisons 95 % are expected inside; with fewer than 180 the chance is below 1 in 500."""
    import numpy as np

    draw = np.random.default_rng(1)
    sides = [[launched(draw, launches, 1.0, 0.15) for _ in range(2)] for _ in range(200)]
    found = [speed_ratio(*pair) for pair in sides]
    assert sum(one is not None and one[1] <= 1 <= one[2] for one in found) >= 180  # type: ignore[operator]


def test_a_step_that_is_15_percent_slower_is_found() -> None:
    import numpy as np

    draw = np.random.default_rng(2)
    found = [speed_ratio(launched(draw, 5, 1.0, 0.04), launched(draw, 5, 1.15, 0.04)) for _ in range(20)]
    assert sum(one is not None and one[2] < 1 for one in found) >= 18  # type: ignore[operator]


def test_two_commits_run_in_turns_from_worktrees(
    tmp_path: Path, e: Experiment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    trees: set[Path] = set()

    def run_suite(commit: str, tree: Path, suite: Path, store: Path) -> None:
        assert (tree / "repro" / "__init__.py").is_file()
        ran.append(store.name)
        trees.add(tree)
        written(store, e, seconds=1.0 if store.name == "a" else 2.0, launches=1)

    monkeypatch.setattr(compare, "_run_suite", run_suite)
    suite = write_suite(tmp_path, '[[experiment]]\nname = "one"')
    asked = ("HEAD~1", "HEAD", "--suite", str(suite), "--results", str(tmp_path / "new"), "--launches", "3")
    code, found = compared(capsys, *asked)
    assert (code, found["speed"]["judged"]) == (1, "worse")
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert len(trees) == 2
    assert not any(tree.exists() for tree in trees)
    assert cli.main(["compare", "no-such-commit", "HEAD", "--suite", str(suite)]) == 2
    assert "compare = 'no-such-commit': is no commit of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_commit_against_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, '[[experiment]]\nname = "one"')
    asked = ("HEAD", "HEAD", "--suite", str(suite), "--results", str(tmp_path), "--launches", "1")
    code, found = compared(capsys, *asked)
    assert (code, found["speed"]["judged"]) == (0, "not decided")


def test_nothing_in_common_and_too_few_steps(
    tmp_path: Path, e: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    written(a, e)
    written(b, synthetic.experiment("other", dp=4))
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "records of experiments that" in capsys.readouterr().err
    short = made_up("a", series={"step_seconds": [[1.0, 1.0]]})
    assert speed_ratio([short] * 3, [made_up("a")] * 3) is None
    assert cli.main(["compare", str(a), str(a), "--tolerance", "2"]) == 2
