"""Tests of `repro run` that is interrupted during a long training and then run again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch.runs import finish, no_orphans, run, start, wait_for, write_suite
from tests.records import latest, lines

EXPERIMENT = """
[[experiment]]
name = "a"
training = { steps = STEPS, untimed_steps = 2, checkpoint_every = 5, data = "shakespeare" }
"""


@pytest.mark.slow
def test_interrupted_run_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """Ctrl-C waits for a checkpoint. The next run, with another layout, also records the losses of the first run."""
    results = tmp_path / "results"
    suite = write_suite(tmp_path, EXPERIMENT.replace("STEPS", "100_000"), limits="hang_s = 60")
    process = start(suite, results, fake=False)
    wait_for(lambda: any(results.glob("checkpoints/*/step-*/index.json")))
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert "a: interrupted  stopped by the user: " in out
    assert "the next run resumes there" in out
    (stopped,) = latest(results).values()
    assert stopped["outcome"] == "interrupted"
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
    suite = write_suite(tmp_path, EXPERIMENT.replace("STEPS", "100_000"), limits="hang_s = 60")
    begun = tmp_path / "begun"
    process = start(suite, tmp_path / "results", FAKE_LOG=str(begun))
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
