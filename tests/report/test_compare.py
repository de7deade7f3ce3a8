"""Two stores side by side: what is slower, larger, failed or judged otherwise, and what is noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.config import Experiment
from repro.report.compare import speed_ratio
from repro.results.measured import experiment_record
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
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
) -> ExperimentRecord:
    found = synthetic.results(e, seconds) if outcome == "ok" else []
    source = {"git": {"commit": commit}}
    record = experiment_record(e, found, suite="s", provenance=source, wall_s=1.0, outcome=outcome, reason="")
    if "memory.peak_bytes" in record.metrics:
        record.metrics["memory.peak_bytes"] *= grown
    with Store(root) as store:
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


def test_the_interval_covers_the_ratio_of_two_noisy_sides(tmp_path: Path, e: Experiment) -> None:
    import numpy as np

    draw = np.random.default_rng(1)
    inside = 0
    for turn in range(40):
        series = [{"step_seconds": [list(draw.lognormal(0, 0.1, 20))]} for _ in range(2)]
        sides = [made_up("a", series=seen) for seen in series]
        found = speed_ratio(*sides, seed=turn)
        assert found is not None
        inside += found[1] <= 1.0 <= found[2]
    assert inside >= 34  # 95 % nominal: fewer than 34 of 40 has a chance of 1 in 500


def test_nothing_in_common_and_too_few_steps(
    tmp_path: Path, e: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    written(a, e)
    written(b, synthetic.experiment("other", dp=4))
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "records of experiments that" in capsys.readouterr().err
    short = made_up("a", series={"step_seconds": [[1.0, 1.0]]})
    assert speed_ratio(short, short) is None
    assert cli.main(["compare", str(a), str(a), "--tolerance", "2"]) == 2
