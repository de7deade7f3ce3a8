"""Tests of the recorder: records on a full disk, the summary of a run and its exit code."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import suites
from repro.launch.recorder import DiskFull, Recorder, run_end, summarise_run
from repro.results.schema import ComparisonRecord, Side
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.records import made_up


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_full_disk_error_names_the_lost_outcome(number: int) -> None:
    def raise_error(record: object) -> None:
        raise OSError(number, "x")

    recorder: Any = SimpleNamespace(store=SimpleNamespace(append=raise_error, folder="/store"))
    record = made_up("a", outcome="oom", reason="out of memory")
    full = number != errno.EACCES
    message = "^out of memory, and the outcome of a did not fit$" if full else "x"
    with pytest.raises(DiskFull if full else OSError, match=message):
        Recorder._append(recorder, record, "out of memory, and the outcome of a did not fit")
    with pytest.raises(DiskFull if full else OSError, match="^disk full: /store$" if full else "x"):
        Recorder._append(recorder, record)


def test_summary_has_a_row_for_every_selected_experiment(tmp_path: Path) -> None:
    """The experiments have expected, unexpected or no outcomes, or need another machine."""
    body = experiments("ok", "hung", "new", "far") + experiments(
        "any", extra='expect = ""\ntraining.lr = 0.5\n'
    )
    suite = suites.load_suite(write_suite(tmp_path, body))
    keys = {entry.experiment.name: entry.experiment.key for entry in suite.entries}
    with Store(tmp_path / "results") as store:
        for name, outcome, reason in (("ok", "ok", ""), ("hung", "hang", "rank 1"), ("any", "oom", "much")):
            store.append(made_up(name, key=keys[name], outcome=outcome, reason=reason))
            (store.root / "logs" / keys[name]).mkdir(parents=True)
        sides = {
            side: Side(name=name, key=keys[name]) for side, name in (("baseline", "ok"), ("subject", "any"))
        }
        numbers = {"metric": "samples_per_s", "ratio": 2.0, "low": 1.5, "high": 2.5, "rounds": 5}
        store.append(ComparisonRecord(suite="s", name="x", **sides, **numbers))
        summary = summarise_run(
            suite, list(suite.entries), store, {"ok"}, dict.fromkeys(keys, "") | {"far": "a GPU"}
        )
        without = [entry for entry in suite.entries if entry.experiment.name != "any"]
        assert summarise_run(suite, without, store, set(), dict.fromkeys(keys, ""))["comparisons"] == []
        traced = summarise_run(suite, list(suite.entries), store, set(), dict.fromkeys(keys, ""), "simulated")
    rows = {row["name"]: row for row in summary["experiments"]}
    assert {name: (row["outcome"], row["expected"], row["reason"]) for name, row in rows.items()} == {
        "ok": ("ok", True, ""),
        "hung": ("hang", False, "rank 1"),
        "new": ("not run", False, ""),
        "far": ("not run", None, "needs a GPU"),
        "any": ("oom", None, "much"),
    }
    assert [name for name, row in rows.items() if not row["already_known"]] == ["ok"]
    assert {name for name, row in rows.items() if row["logs"]} == {"hung"}
    assert summary["counts"] == {"ok": 1, "hang": 1, "not run": 2, "oom": 1}
    assert summary["comparisons"] == [{"subject": "any", "baseline": "ok", **numbers}]
    assert (traced["counts"], traced["comparisons"]) == ({"not run": 5}, [])


@pytest.mark.parametrize(
    ("expected", "failure", "signal", "stopped", "code"),
    [
        ([True, None], "", 0, "", 0),
        ([True, False], "", 0, "", 1),
        ([True], "disk full", 0, "disk full", 1),
        ([True], "", 15, "by signal 15", 143),
        ([False], "disk full", 2, "disk full", 130),
    ],
)
def test_exit_code_of_a_run(expected: list[Any], failure: str, signal: int, stopped: str, code: int) -> None:
    end = run_end({"experiments": [{"expected": one} for one in expected]}, failure=failure, signal=signal)
    assert (end.summary["stopped"], end.code) == (stopped, code)
