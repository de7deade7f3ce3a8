"""Tests of repeated `repro run` on one store: after an interrupt, and after the clock was set back."""

from __future__ import annotations

import json
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from repro import cli
from repro.report import evidence
from repro.results import schema
from tests.launch.runs import FAKE, ROOT, experiments, finish, no_orphans, run, start, wait_for, write_suite
from tests.records import latest, lines

LONG = """
[[experiment]]
name = "a"
training = { steps = 100_000, untimed_steps = 2, checkpoint_every = 5, data = "shakespeare" }
"""


@pytest.mark.slow
def test_interrupted_run_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """Ctrl-C waits for a checkpoint. The next run, with another layout, also records the losses of the first run."""
    suite, results = write_suite(tmp_path, LONG), tmp_path / "results"
    process = start(suite, results, fake=False)
    wait_for(lambda: any(results.glob("checkpoints/*/step-*/index.json")))
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert "a: interrupted  stopped by the user: " in out
    assert "the next run resumes from this step" in out
    (stopped,) = latest(results).values()
    stop_step = max(int(path.parent.name[5:]) for path in results.glob("checkpoints/*/step-*/index.json"))
    assert f"after step {stop_step};" in stopped["reason"]
    text = suite.read_text().replace("100_000", str(stop_step + 6))
    suite.write_text(text.replace("dp = 2", "dp = 1, micro_batch = 1, global_batch = 2"))
    code, out, err = run(suite, results, fake=False)
    assert code == 0, err
    (record,) = (r for r in lines(results) if r["outcome"] == "ok")
    assert record["series"]["resumed_from"] == [stop_step]
    assert record["metrics"]["resumed_from"] == stop_step
    assert record["metrics"]["steps"] == len(record["series"]["loss"]) == stop_step + 6
    assert sum(map(len, record["series"]["step_seconds"])) == 6 - 2, "only the last start has times"
    assert record["checkpoints"]["times"] == f"of the steps after {stop_step}, since the last start"
    assert record["checkpoints"]["written"][-1] == stop_step + 6
    assert not record["checkpoints"]["failures"]


def test_second_signal_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The fake ranks never write a checkpoint."""
    begun = tmp_path / "begun"
    process = start(write_suite(tmp_path, LONG), tmp_path / "results", FAKE_LOG=str(begun))
    wait_for(begun.exists)
    with no_orphans(process):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        wait_for(lambda: "a second signal ends the run at once" in process.stderr.readline())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code, out, _ = finish(process)
    assert code == 130
    assert "a: interrupted  stopped by the user (rank" in out


def test_last_run_counts_after_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, results = write_suite(tmp_path, experiments("a")), tmp_path / "results"
    monkeypatch.setenv("REPRO_RANK_TARGET", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    true_ns = time.time_ns

    def set_back(days: int) -> None:
        shifted = Mock(wraps=datetime, now=lambda tz=None: datetime.now(tz) - timedelta(days=days))
        monkeypatch.setattr(schema, "datetime", shifted)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() - days * 86_400 * 10**9)

    def run(fault: str, *arguments: str) -> tuple[int, str, str]:
        """Run `repro run`; return its exit code, the outcome in its summary and its notes."""
        monkeypatch.setenv("FAKE_FAULT", fault)
        code = cli.main(["run", str(suite), "--results", str(results), "--json", *arguments])
        out, err = capsys.readouterr()
        (row,) = json.loads(out)["experiments"]
        return code, row["outcome"], "".join(line for line in err.splitlines() if line.startswith("note:"))

    def assert_last_line_is_shown() -> None:
        """Check that `repro results` shows the last line of the store, which claims also read."""
        cli.main(["results", "--results", str(results), "--json"])
        (row,) = json.loads(capsys.readouterr().out)["experiments"]
        assert row["written"] == lines(results)[-1]["written"]
        assert [record.written for record in evidence.read_store(results).latest()] == [row["written"]]

    assert run("raise:a:0:2") == (1, "error", "")
    set_back(1)
    code, outcome, note = run("")
    assert (code, outcome) == (0, "ok")
    assert note.startswith("note: the clock is 24 h 0 min behind the newest record in ")
    assert_last_line_is_shown()
    assert run("") == (0, "ok", ""), "the experiment has a record and does not run"
    set_back(2)
    assert run("", "--rerun")[:2] == (0, "ok")
    assert_last_line_is_shown()
    set_back(3)
    assert run("raise:a:0:2", "--rerun")[:2] == (1, "error")
    assert [line["outcome"] for line in lines(results)] == ["error", "ok", "ok", "error"]
    times = [line["written"] for line in lines(results)]
    assert times == sorted(times, reverse=True)
