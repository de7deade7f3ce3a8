"""Tests of the experiments that `repro run`, also with `--dry-run`, starts or leaves to another machine."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from repro import cli, engines
from repro.config import ConfigError
from repro.config.suites import load_suite
from repro.launch.run import preview_run
from repro.results.store import Store
from tests.launch.runs import FAKE, ROOT, experiments, write_suite
from tests.records import changed, lines, made_up

SMOKE = ["run", "smoke", "--only", "smoke/states-z0-dp2", "--dry-run"]
FAR = '[[experiment]]\nname = "far"\nmodel = "gpt2-1.5b"\nsystem = "dgx2"\nlayout.dp = 16\n'
TORCH = '[[experiment]]\nname = "torch"\nengine = "torch"\nlayout.zero = 1\n'
ON_DGX2 = "needs 16 GPUs of system dgx2; `--evidence simulated` simulates the experiment here"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the lines that `repro` prints, with single spaces."""
    assert cli.main([*arguments]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_preview_contains_state_location_steps_and_times(tmp_path: Path) -> None:
    body = experiments("a", "known") + FAR + TORCH
    suite = write_suite(tmp_path, body, limits="timeout_s = 7")
    key = load_suite(suite).entry("known").experiment.key
    with Store(tmp_path / "results") as store:
        for evidence, seconds in (("measured", 3.0), ("simulated", 4.0)):
            store.append(made_up("known", suite="faults", key=key, evidence=evidence, wall_s=seconds))
        store.append(made_up("a", suite="another", key="other", wall_s=99.0))
    before = sorted(tmp_path.rglob("*"))

    def preview(evidence: str, system: str = "", rerun: bool = False) -> list[tuple[object, ...]]:
        found = preview_run([suite], [], tmp_path / "results", rerun, evidence, system)
        return [astuple(row)[1:7] for row in found]

    here, known = ("to run", "2 ranks here", 6, None, 7.0), ("2 ranks here", 6, 3.0, 7.0)
    assert preview("measured") == [
        ("a", *here),
        ("known", "in the store", *known),
        ("far", "not here", ON_DGX2, 6, None, 7.0),
        ("torch", *here),
    ]
    assert preview("measured", rerun=True)[1] == ("known", "to run", *known)
    local = "simulation of 2 ranks on system local"
    lacking = "needs engine = native: training steps of other engines cannot be simulated"
    assert preview("simulated") == [
        ("a", "to run", local, 1, None, 0.0),
        ("known", "to run", local, 1, 4.0, 0.0),  # the record has another system description
        ("far", "to run", "simulation of 16 ranks on system dgx2", 1, None, 0.0),
        ("torch", "not here", lacking, 1, None, 0.0),
    ]
    moved = preview("simulated", "selene")[0]
    assert moved == ("a@selene", "to run", "simulation of 2 ranks on system selene", 1, None, 0.0)
    assert sorted(tmp_path.rglob("*")) == before, "a preview changes no file"


def test_estimated_time_is_that_of_the_last_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = load_suite(Path("smoke")).entry("states-z0-dp2").experiment
    for evidence, row in (
        ("measured", f"states-z0-dp2 to run 2 ranks here {known.training.steps} – 300"),
        ("simulated", "states-z0-dp2 to run simulation of 2 ranks on system local 1 – –"),
    ):
        message = printed(capsys, *SMOKE, "--results", str(tmp_path), "--details", "--evidence", evidence)
        assert message[1] == "Estimated time: no estimate for 1 experiment without an earlier run."
        assert message[-1] == row
    with Store(tmp_path) as store:
        store.append(changed(made_up("states-z0-dp2", suite="smoke"), key=known.key, wall_s=12.5))
    assert printed(capsys, *SMOKE, "--rerun", "--results", str(tmp_path))[:2] == [
        "1 experiment: 1 to run, 0 in the store, 0 not here.",
        "Estimated time: 12.5 s for 1 experiment by the durations of their last runs.",
    ]
    assert cli.main([*SMOKE, str(write_suite(tmp_path, FAR)), "--json", "--results", str(tmp_path)]) == 0
    rows = [(row["suite"], row["name"], row["state"]) for row in json.loads(capsys.readouterr().out)]
    assert rows == [("smoke", "states-z0-dp2", "in the store"), ("faults", "far", "not here")]


def test_dry_run_counts_experiments_for_other_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="suite = 'smok': unknown suite; did you mean smoke"):
        load_suite(Path("smok"))
    experiments = [entry.experiment for entry in load_suite(Path("zero_throughput")).entries]
    message = printed(capsys, "run", "zero_throughput", "--dry-run", "--results", str(tmp_path))
    steps = [experiment.training.steps for experiment in experiments if experiment.system == "local"]
    wide = sum(experiment.layout.world == 128 for experiment in experiments)
    here, far = len(steps), len(experiments) - len(steps)
    assert message[0] == f"{len(experiments)} experiments: {here} to run, 0 in the store, {far} not here."
    assert f"not run: {wide} experiments: needs 128 GPUs of system dgx2." in message
    assert f"`--evidence simulated` can simulate {far} of these experiments on this machine." in message
    assert f"4 ranks here {here} {sum(steps)}" in message


def test_brackets_in_names_and_messages_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would treat `[engines]` in `pip install -e '.[engines]'` as a style and omit it."""
    monkeypatch.setattr(engines, "missing_library", lambda engine: "b: pip install -e '.[engines]'")
    suite = write_suite(tmp_path, experiments("a[1]"))
    message = " ".join(printed(capsys, "run", str(suite), "--dry-run", "--details"))
    assert "a[1]" in message
    assert ".[engines]" in message


def test_experiments_for_a_cluster_are_listed_but_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, results = write_suite(tmp_path, FAR + experiments("twin")), tmp_path / "results"
    command = ["run", str(suite), "--results", str(results)]
    monkeypatch.setenv("REPRO_RANK_TARGET", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run() -> tuple[int, list[tuple[Any, ...]]]:
        code = cli.main([*command, "--json"])
        rows = json.loads(capsys.readouterr().out)["experiments"]
        return code, [(row["name"], row["outcome"], row["expected"]) for row in rows]

    monkeypatch.setenv("FAKE_FAULT", "raise:twin:1:2")
    assert run() == (1, [("far", "not run", None), ("twin", "error", False)])
    monkeypatch.delenv("FAKE_FAULT")
    assert printed(capsys, *command)[:3] == [
        "faults: 2 experiments: 1 not run, 1 ok; all that can run here as expected",
        "not run: 1 experiment: needs 16 GPUs of system dgx2.",
        "`--evidence simulated` can simulate 1 of these experiments on this machine.",
    ]
    assert [(line["name"], line["outcome"]) for line in lines(results)] == [("twin", "error"), ("twin", "ok")]
    with Store(results) as store:
        store.append(made_up("far", key=load_suite(suite).entry("far").experiment.key, suite="faults"))
    assert run() == (0, [("far", "ok", True), ("twin", "ok", True)]), "a record of the cluster is shown"
