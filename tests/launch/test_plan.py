"""What remains to be run is what the store lacks."""

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


def put(store: Store, suite: suites.Suite, name: str, outcome: str = "ok") -> None:
    store.append(made_up(name, key=suite.entry(name).experiment.key, outcome=outcome))


def put_ratio(store: Store, suite: suites.Suite, baseline: str, subject: str) -> None:
    sides = [Side(name=name, key=suite.entry(name).experiment.key) for name in (baseline, subject)]
    numbers = {"metric": "samples_per_s", "ratio": 1.0, "low": None, "high": None, "rounds": 4}
    store.append(ComparisonRecord(suite="s", name="x", baseline=sides[0], subject=sides[1], **numbers))


def names(tasks: list[plan.Task]) -> list[str]:
    """One word a launch, compared ones in capitals."""
    joined = ["".join(e.name for e in task.experiments) for task in tasks]
    return [word.upper() if task.comparison else word for word, task in zip(joined, tasks, strict=True)]


def planned(
    store: Store, suite: suites.Suite, only: list[str] | None = None, rerun: bool = False
) -> list[str]:
    return names(plan.plan_tasks(suite, plan.select_entries(suite, only or []), store, rerun=rerun))


def test_conclusive_outcomes_are_not_repeated(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcdef")))
    for name, outcome in zip(
        "abcdef", ("ok", "oom", "diverged", "hang", "error", "interrupted"), strict=True
    ):
        put(store, suite, name, outcome)
    assert planned(store, suite) == ["d", "e", "f"]
    assert planned(store, suite, ["[a-d]"]) == ["d"]
    assert planned(store, suite, rerun=True) == list("abcdef")


def test_launches_are_shared(tmp_path: Path, store: Store) -> None:
    body = experiments("a") + "\n".join(
        f'[[experiment]]\nname = "{name}"\nlaunch = "two"\ntraining.seed = {ord(name)}' for name in "bcd"
    )
    suite = suites.load_suite(write_suite(tmp_path, body))
    assert planned(store, suite) == ["a", "bcd"]
    put(store, suite, "c")
    assert planned(store, suite) == ["a", "bd"]


def test_a_comparison_needs_its_baseline_again(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
    assert planned(store, suite) == ["ABC", "d"]
    for name in "abcd":
        put(store, suite, name)
    assert planned(store, suite) == ["ABC"]
    put_ratio(store, suite, "a", "b")
    assert planned(store, suite) == ["AC"]
    put_ratio(store, suite, "a", "c")
    assert planned(store, suite) == []


@pytest.mark.parametrize("outcome", ["oom", "diverged"])
def test_what_cannot_be_had_is_not_compared(tmp_path: Path, store: Store, outcome: str) -> None:
    """Nor is anything run again beside a baseline that will diverge again."""
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abc") + COMPARE))
    put(store, suite, "b", outcome)
    assert planned(store, suite) == ["AC"]
    put(store, suite, "a", outcome)
    assert planned(store, suite) == ["c"]
    put(store, suite, "c")
    assert planned(store, suite) == []


def test_a_part_of_a_comparison(tmp_path: Path, store: Store) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcd") + COMPARE))
    assert planned(store, suite, ["a", "c"]) == ["AC"]
    assert planned(store, suite, ["b", "c"]) == ["b", "c"]
    assert planned(store, suite, ["a"]) == ["a"]
    second = '\n[[compare]]\nbaseline = "d"\nsubjects = ["e"]\nrounds = 4'
    suite = suites.load_suite(write_suite(tmp_path, experiments(*"abcde") + COMPARE + second))
    for without in ("a", "b"):  # the baseline or the subject of the first says nothing of the second
        assert planned(store, suite, ["d", "e", without]) == [without, "DE"]


def test_only_must_match_something(tmp_path: Path) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments("a", "b")))
    with pytest.raises(ConfigError, match=r"--only = 'x\*': must be a glob that matches .*: a, b"):
        plan.select_entries(suite, ["a", "x*"])


def test_a_key_is_held_until_it_is_let_go_of(tmp_path: Path) -> None:
    mine, theirs, third = (ExperimentLocks(tmp_path) for _ in range(3))
    assert mine.take(["a", "b"])
    assert not theirs.take(["b", "0"])
    assert third.take(["0"]), "who does not get all of them holds none"
    assert not theirs.take(["a"])
    mine.release()
    assert theirs.take(["a", "b"])
    assert not mine.take(["b"])


def test_others_of_the_store_may_look_at_a_lock(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert ExperimentLocks(tmp_path / "new" / "store").take(["a"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "store" / "locks" / "a").stat().st_mode) == 0o644


def test_who_takes_a_key_of_a_killed_run_removes_its_files(tmp_path: Path) -> None:
    for name, swept in (("repro-x", True), ("home", False)):
        folder = tmp_path / name
        folder.mkdir()
        killed, heir = ExperimentLocks(tmp_path), ExperimentLocks(tmp_path)
        assert killed.take(["a"])
        killed.remember(folder)
        note = (tmp_path / "locks" / "a").read_bytes()
        killed.release()
        (tmp_path / "locks" / "a").write_bytes(note)  # a kill lets go and leaves the note
        assert heir.take(["a"])
        assert folder.exists() != swept
        assert (tmp_path / "locks" / "a").read_bytes() == b""
        heir.release()
