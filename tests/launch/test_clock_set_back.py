"""Tests of `repro run` after the system clock was set back: the outcome of the last run counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.report import evidence
from repro.results import schema
from tests.launch.runs import FAKE, ROOT, experiments, write_suite
from tests.records import lines

SetBack = Callable[[int], None]


@pytest.fixture
def set_back(monkeypatch: pytest.MonkeyPatch) -> SetBack:
    """Return a function that sets the clock of this process back by a number of days."""
    true_ns, true_datetime = time.time_ns, datetime

    def step(days: int) -> None:
        class ShiftedDatetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return true_datetime.now(tz) - timedelta(days=days)

        monkeypatch.setattr(schema, "datetime", ShiftedDatetime)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() - days * 86_400 * 10**9)

    return step


def test_last_run_counts_after_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], set_back: SetBack
) -> None:
    suite, results = write_suite(tmp_path, experiments("a")), tmp_path / "results"
    monkeypatch.setenv("REPRO_RANK_TARGET", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(fault: str, *arguments: str) -> tuple[int, str, str]:
        """Run `repro run`; return its exit code, the outcome in its summary and its notes."""
        monkeypatch.setenv("FAKE_FAULT", fault)
        code = cli.main(["run", str(suite), "--results", str(results), "--json", *arguments])
        out, err = capsys.readouterr()
        (row,) = json.loads(out)["experiments"]
        return code, row["outcome"], "".join(line for line in err.splitlines() if line.startswith("note:"))

    def shown_time() -> str:
        """Return the time of the record that `repro results` shows; claims read the same record."""
        cli.main(["results", "--results", str(results), "--json"])
        (row,) = json.loads(capsys.readouterr().out)["experiments"]
        assert [record.written for record in evidence.read_store(results).latest()] == [row["written"]]
        return str(row["written"])

    assert run("raise:a:0:2") == (1, "error", "")
    set_back(1)
    code, outcome, note = run("")
    assert (code, outcome) == (0, "ok")
    assert note.startswith("note: the clock is 24 h 0 min behind the newest record in ")
    assert shown_time() == lines(results)[-1]["written"]
    assert run("") == (0, "ok", ""), "the experiment has a record and does not run"
    set_back(2)
    assert run("", "--rerun")[:2] == (0, "ok")
    assert shown_time() == lines(results)[-1]["written"]
    set_back(3)
    assert run("raise:a:0:2", "--rerun")[:2] == (1, "error")
    assert [line["outcome"] for line in lines(results)] == ["error", "ok", "ok", "error"]
    times = [line["written"] for line in lines(results)]
    assert times == sorted(times, reverse=True)
