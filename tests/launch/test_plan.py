"""Tests of the plan of a run, which contains the experiments without a conclusive record, and of its locks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from repro.config import ConfigError, suites
from repro.launch import plan
from repro.launch.plan import ExperimentLocks
from repro.results.schema import ComparisonRecord, Side
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.records import made_up

COMPARE = '[[compare]]\nbaseline = "a"\nsubjects = ["b", "c"]\nrounds = 4'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def add_record(store: Store, suite: suites.Suite, name: str, outcome: str = "ok") -> None:
    store.append(made_up(name, key=suite.entry(name).experiment.key, outcome=outcome))


def add_comparison(store: Store, suite: suites.Suite, baseline: str, subject: str) -> None:
    sides = [Side(name=name, key=suite.entry(name).experiment.key) for name in (baseline, subject)]
    numbers = {"metric": "samples_per_s", "ratio": 1.0, "low": None, "high": None, "rounds": 4}
    store.append(ComparisonRecord(suite="s", name="x", baseline=sides[0], subject=sides[1], **numbers))


def planned(
    store: Store, suite: suites.Suite, only: list[str] | None = None, rerun: bool = False
) -> list[str]:
    """Return one word per planned launch, made of experiment names; a comparison is in capitals."""
    tasks = plan.plan_tasks(suite, plan.select_entries(suite, only or []), store, rerun=rerun)
    words = ["".join(e.name for e in task.experiments) for task in tasks]
    return [word.upper() if task.comparison else word for word, task in zip(words, tasks, strict=True)]


def test_conclusive_outcomes_are_not_repeated(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcdef")))
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
    suite = suites.load_suite(write_suite(tmp_path, body))
    assert planned(store, suite) == ["a", "bcd"]
    add_record(store, suite, "c")
    assert planned(store, suite) == ["a", "bd"]


def test_missing_comparison_runs_its_baseline_again(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
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
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abc") + COMPARE))
    for name, recorded, expected in (("b", outcome, ["AC"]), ("a", outcome, ["c"]), ("c", "ok", [])):
        add_record(store, suite, name, recorded)
        assert planned(store, suite) == expected


def test_selection_may_contain_part_of_a_comparison(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
    assert planned(store, suite, ["a", "c"]) == ["AC"]
    assert planned(store, suite, ["b", "c"]) == ["b", "c"]
    assert planned(store, suite, ["a"]) == ["a"]
    second = '\n[[compare]]\nbaseline = "d"\nsubjects = ["e"]\nrounds = 4'
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcde") + COMPARE + second))
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
