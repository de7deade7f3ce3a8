"""Tests of the plan of a run, its locks, and its preview with experiments for other machines."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from repro import cli, engines
from repro.config import ConfigError
from repro.config.suites import Suite, load_suite
from repro.launch import plan
from repro.launch.plan import ExperimentLocks
from repro.launch.run import preview_run
from repro.results.schema import ComparisonRecord, Side
from repro.results.store import Store
from tests.launch.runs import FAKE, ROOT, experiments, write_suite
from tests.records import changed, lines, made_up

COMPARE = '[[compare]]\nbaseline = "a"\nsubjects = ["b", "c"]\nrounds = 4'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def add_record(store: Store, suite: Suite, name: str, outcome: str = "ok") -> None:
    store.append(made_up(name, key=suite.entry(name).experiment.key, outcome=outcome))


def add_comparison(store: Store, suite: Suite, baseline: str, subject: str) -> None:
    sides = [Side(name=name, key=suite.entry(name).experiment.key) for name in (baseline, subject)]
    numbers = {"metric": "samples_per_s", "ratio": 1.0, "low": None, "high": None, "rounds": 4}
    store.append(ComparisonRecord(suite="s", name="x", baseline=sides[0], subject=sides[1], **numbers))


def planned(store: Store, suite: Suite, only: list[str] | None = None, rerun: bool = False) -> list[str]:
    """Return one word per planned launch, made of experiment names; a comparison is in capitals."""
    tasks = plan.plan_tasks(suite, plan.select_entries(suite, only or []), store, rerun=rerun)
    words = ["".join(e.name for e in task.experiments) for task in tasks]
    return [word.upper() if task.comparison else word for word, task in zip(words, tasks, strict=True)]


def test_conclusive_outcomes_are_not_repeated(tmp_path: Path, store: Store) -> None:
    suite = load_suite(write_suite(tmp_path, experiments(*"abcdef")))
    outcomes = ("ok", "oom", "diverged", "hang", "error", "interrupted")
    for name, outcome in zip("abcdef", outcomes, strict=True):
        add_record(store, suite, name, outcome)
    assert planned(store, suite) == ["d", "e", "f"]
    assert planned(store, suite, ["[a-d]"]) == ["d"]
    assert planned(store, suite, rerun=True) == list("abcdef")
    with pytest.raises(ConfigError, match=r"--only = 'x\*': must be a glob that matches .*: a, b"):
        plan.select_entries(suite, ["a", "x*"])


def test_experiments_with_equal_launch_key_share_a_launch(tmp_path: Path, store: Store) -> None:
    body = experiments("a") + "\n".join(
        f'[[experiment]]\nname = "{name}"\nlaunch = "two"\ntraining.seed = {ord(name)}' for name in "bcd"
    )
    suite = load_suite(write_suite(tmp_path, body))
    assert planned(store, suite) == ["a", "bcd"]
    add_record(store, suite, "c")
    assert planned(store, suite) == ["a", "bd"]


def test_missing_comparison_runs_its_baseline_again(tmp_path: Path, store: Store) -> None:
    suite = load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
    assert planned(store, suite) == ["ABC", "d"]
    for name in "abcd":
        add_record(store, suite, name)
    assert planned(store, suite) == ["ABC"]
    add_comparison(store, suite, "a", "b")
    assert planned(store, suite) == ["AC"]
    add_comparison(store, suite, "a", "c")
    assert planned(store, suite) == []


@pytest.mark.parametrize("outcome", ["oom", "diverged"])
def test_failed_experiments_are_not_compared(tmp_path: Path, store: Store, outcome: str) -> None:
    """After a failed baseline, only subjects without a record run, and without a comparison."""
    suite = load_suite(write_suite(tmp_path, experiments(*"abc") + COMPARE))
    for name, recorded, expected in (("b", outcome, ["AC"]), ("a", outcome, ["c"]), ("c", "ok", [])):
        add_record(store, suite, name, recorded)
        assert planned(store, suite) == expected


def test_selection_may_contain_part_of_a_comparison(tmp_path: Path, store: Store) -> None:
    suite = load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
    assert planned(store, suite, ["a", "c"]) == ["AC"]
    assert planned(store, suite, ["b", "c"]) == ["b", "c"]
    assert planned(store, suite, ["a"]) == ["a"]
    second = '\n[[compare]]\nbaseline = "d"\nsubjects = ["e"]\nrounds = 4'
    suite = load_suite(write_suite(tmp_path, experiments(*"abcde") + COMPARE + second))
    for single in ("a", "b"):  # a part of the first comparison does not change the second
        assert planned(store, suite, ["d", "e", single]) == [single, "DE"]


def test_keys_are_locked_until_their_release(tmp_path: Path) -> None:
    first, second, third = (ExperimentLocks(tmp_path) for _ in range(3))
    assert first.take(["a", "b"])
    assert not second.take(["b", "0"])
    assert third.take(["0"]), "a failed attempt locks no key"
    third.release()
    assert not second.take(["a"])
    first.release()
    assert second.take(["a", "b"])
    assert not first.take(["b"])
    before = os.umask(0)
    try:
        assert third.take(["c"])
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tmp_path / "locks" / "c").stat().st_mode)
    assert mode == 0o644, "other users may read lock files but not write"


def test_lock_of_a_killed_run_removes_its_folder(tmp_path: Path) -> None:
    for name, is_removed in (("repro-x", True), ("home", False)):
        folder = tmp_path / name
        folder.mkdir()
        killed, successor = ExperimentLocks(tmp_path), ExperimentLocks(tmp_path)
        assert killed.take(["a"])
        killed.remember(folder)
        note = (tmp_path / "locks" / "a").read_bytes()
        killed.release()
        (tmp_path / "locks" / "a").write_bytes(note)  # a kill frees the lock but not the note
        assert successor.take(["a"])
        assert folder.exists() != is_removed
        assert (tmp_path / "locks" / "a").read_bytes() == b""
        successor.release()


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


def test_dry_run_counts_experiments_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
