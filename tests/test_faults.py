"""Tests of `repro run` under faults: outcomes in the store, no orphan process, and completion by the next run.

Most ranks are fake ranks without torch that inject faults on request. The last tests have real ranks.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from repro.launch.rank_process import _PHASE
from tests.launch.runs import (
    experiments,
    fill,
    finish,
    no_orphans,
    run,
    small_disk,
    start,
    wait_for,
    write_suite,
)
from tests.records import latest, lines


def outcomes(results: Path) -> dict[str, str]:
    """Return the newest outcome of each experiment, by name."""
    return {record["name"]: record["outcome"] for record in latest(results).values()}


def reason(results: Path, name: str) -> str:
    return next(record["reason"] for record in latest(results).values() if record["name"] == name)


def started_experiments(log: Path) -> list[str]:
    """Return the names of the experiments that ranks have started, in order."""
    return log.read_text().split() if log.exists() else []


def folder_of(rank: psutil.Process) -> Path:
    """Return the folder of the launch of a rank process."""
    command = rank.cmdline()
    return Path(command[command.index("--folder") + 1])


def hold_folder(folder: Path, *names: str) -> str:
    """Return the folder for FAKE_HOLD, which makes fake ranks wait in the second step of these experiments."""
    for name in names:
        (folder / "hold").mkdir(exist_ok=True)
        (folder / "hold" / name).touch()
    return str(folder / "hold")


@pytest.mark.parametrize(
    ("fault", "outcome", "expected", "shared"),
    [
        ("kill:b:1:3", "error", "rank 1 was killed by signal 9 (SIGKILL) at step 3, backward, after collective", False),
        ("stop:b:0:2", "hang", "rank 0 is stopped (SIGSTOP or a debugger) at step 2, backward", True),
        ("nan:b:1:2", "diverged", "rank 1 at step 2, backward, after collective all_reduce", True),
    ],
)  # fmt: skip
def test_a_failed_experiment_does_not_affect_other_experiments(
    tmp_path: Path, fault: str, outcome: str, expected: str, shared: bool
) -> None:
    body = experiments(*"abc", extra='launch = "x"' if shared else "")
    if outcome == "hang":  # only for b, so that no slow experiment is reported as hanging
        body = body.replace('name = "b"', 'name = "b"\nlimits.hang_s = 4')
    suite, results, log = write_suite(tmp_path, body), tmp_path / "results", tmp_path / "log"
    code, out, _ = run(suite, results, FAKE_FAULT=fault, FAKE_LOG=str(log))
    assert code == 1
    assert outcomes(results) == {"a": "ok", "b": outcome, "c": "ok"}
    assert expected in reason(results, "b")
    assert expected in out
    assert started_experiments(log) == ["a", "b", "c"]
    conclusive = outcome == "diverged"
    logs = [path.read_text() for path in results.glob("logs/*/rank-1.err")]
    assert conclusive or logs, "the store must have the logs of the failure"
    assert outcome != "hang" or "most recent call first" in logs[0], "the stack of the waiting rank is lost"
    # Without the fault, the next run runs only the experiments without a conclusive result.
    log.unlink()
    code, out, _ = run(suite, results, FAKE_LOG=str(log))
    assert started_experiments(log) == ([] if conclusive else ["b"])
    assert code == (1 if conclusive else 0)
    assert outcomes(results)["b"] == ("diverged" if conclusive else "ok")


def test_an_expected_out_of_memory_is_no_failure(tmp_path: Path) -> None:
    body = experiments("a") + '[[experiment]]\nname = "b"\nexpect = "oom"\nlimits.memory_bytes = 50_000_000'
    suite, results = write_suite(tmp_path, body), tmp_path / "results"
    code, out, _ = run(suite, results, FAKE_FAULT="memory:b:1:3")
    assert code == 0
    assert outcomes(results) == {"a": "ok", "b": "oom"}
    assert "rank 1 at step 3" in reason(results, "b")
    assert out.startswith("faults: 2 experiments: 1 ok, 1 oom; all as expected\n")
    code, out, err = run(suite, results, "--json")
    assert (code, json.loads(out)["counts"]) == (0, {"ok": 1, "oom": 1})
    assert "2 experiments already have a record, 0 to run" in err
    code, _, _ = run(suite, results, "--rerun", "--only", "b")
    assert code == 1, "a training that fits is a failure if `oom` is expected"
    assert outcomes(results) == {"a": "ok", "b": "ok"}


def test_a_failure_in_a_comparison_keeps_the_other_comparisons(tmp_path: Path) -> None:
    compare = '[[compare]]\nbaseline = "a"\nsubjects = ["b", "c"]\nrounds = 4'
    suite, results = write_suite(tmp_path, experiments(*"abc") + compare), tmp_path / "results"
    code, _, _ = run(suite, results, FAKE_FAULT="nan:b:0:2")
    assert code == 1
    assert outcomes(results) == {"a": "ok", "b": "diverged", "c": "ok"}
    assert [line["name"] for line in lines(results) if line["kind"] == "comparison"] == ["a vs c"]
    log = tmp_path / "log"
    run(suite, results, FAKE_LOG=str(log))
    assert started_experiments(log) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_stores_completed_experiments_and_leaves_no_orphan(tmp_path: Path, number: int) -> None:
    suite = write_suite(tmp_path, experiments(*"abc", extra='launch = "x"'))
    results, log = tmp_path / "results", tmp_path / "log"
    process = start(suite, results, "--json", FAKE_LOG=str(log), FAKE_HOLD=hold_folder(tmp_path, "b"))
    wait_for(lambda: started_experiments(log) == ["a", "b"] and outcomes(results) == {"a": "ok"})
    with no_orphans(process) as ranks:
        (folder,) = {folder_of(rank) for rank in ranks}
        os.kill(process.pid, number)
        code, out, _ = finish(process)
    if number == signal.SIGKILL:
        assert outcomes(results) == {"a": "ok"}
        assert folder.exists()
    else:
        assert code == 128 + number
        assert outcomes(results) == {"a": "ok", "b": "interrupted"}
        assert "rank 0 was" in reason(results, "b") or "ranks 0, 1 at step" in reason(results, "b")
        assert json.loads(out)["counts"] == {"ok": 1, "interrupted": 1, "not run": 1}
    log.unlink()
    assert run(suite, results, FAKE_LOG=str(log))[0] == 0
    assert started_experiments(log) == ["b", "c"]
    assert outcomes(results) == {"a": "ok", "b": "ok", "c": "ok"}
    assert not folder.exists(), "the next run must remove the folder of a killed run"


def test_launcher_killed_during_rank_startup_leaves_no_orphan(tmp_path: Path) -> None:
    """The ranks may not yet have called prctl, which makes them end with the launcher."""
    suite, results = write_suite(tmp_path, experiments("a")), tmp_path / "results"
    process = start(suite, results, FAKE_STEP_S="1")
    with no_orphans(process):
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
    assert run(suite, results)[0] == 0
    assert outcomes(results) == {"a": "ok"}


def test_two_concurrent_runs_share_the_experiments(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, experiments(*"abcdef"))
    results, log = tmp_path / "results", tmp_path / "log"
    variables = {"FAKE_LOG": str(log), "FAKE_HOLD": hold_folder(tmp_path, "a"), "FAKE_STEP_S": "0.03"}
    processes = [start(suite, results, **variables) for _ in range(2)]
    wait_for(lambda: len(outcomes(results)) > 0)  # an experiment of the process that does not wait in a
    (tmp_path / "hold" / "a").unlink()
    ends = [finish(process) for process in processes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(started_experiments(log)) == list("abcdef"), "each experiment must run once"
    records = sorted((record["name"], record["outcome"]) for record in lines(results))
    assert records == [(name, "ok") for name in "abcdef"]
    assert len(list((results / "records").glob("*.jsonl"))) == 2, "both processes must have stored records"


def test_an_equal_experiment_with_another_name_copies_its_record(tmp_path: Path) -> None:
    results, log = tmp_path / "results", tmp_path / "log"
    run(write_suite(tmp_path, experiments("a"), name="first"), results)
    assert run(write_suite(tmp_path, experiments("z"), name="second"), results, FAKE_LOG=str(log))[0] == 0
    assert started_experiments(log) == []
    found = {line["name"]: line for line in lines(results)}  # two files may have the same second
    first, second = found["a"], found["z"]
    assert (second["suite"], second["copy_of"]) == ("second", first["id"])
    assert second["metrics"] == first["metrics"]
    before = lines(results)
    run(tmp_path / "first.toml", results)
    run(tmp_path / "second.toml", results)
    assert lines(results) == before, "repeated runs must not copy records again"


def test_a_full_disk_is_reported_and_stops_the_run(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, experiments("a", "b"))
    log = tmp_path / "log"
    with small_disk(tmp_path) as disk:
        results = disk / "results"
        process = start(suite, results, FAKE_LOG=str(log), FAKE_HOLD=hold_folder(tmp_path, "a"))
        wait_for(lambda: started_experiments(log) == ["a"])
        fill(disk)
        (tmp_path / "hold" / "a").unlink()
        code, out, err = finish(process)
        assert code == 1
        assert "Traceback" not in err
        assert "disk full" in out
        assert outcomes(results) == {"a": "error"}
        assert "disk full" in reason(results, "a")
        assert started_experiments(log) == ["a"], "with a full disk, no further experiment may start"
        (disk / "filler").unlink()
        assert run(suite, results, FAKE_LOG=str(log))[0] == 0
        assert outcomes(results) == {"a": "ok", "b": "ok"}


def test_an_invalid_results_folder_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(write_suite(tmp_path, experiments("a")), tmp_path / "file" / "results")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")


@pytest.mark.slow
def test_real_ranks_run_out_of_memory_and_diverge(tmp_path: Path) -> None:
    body = """
        [[experiment]]
        name = "well"
        launch = "x"
        [[experiment]]
        name = "nan"
        launch = "x"
        training = { lr = 1e30, clip = 0.0 }
        [[experiment]]
        name = "big"
        expect = "oom"
        model = "limit-40m"
        limits.memory_bytes = 50_000_000
    """
    suite, results = write_suite(tmp_path, body), tmp_path / "results"
    code, out, err = run(suite, results, fake=False)
    assert code == 1, err
    assert outcomes(results) == {"well": "ok", "nan": "diverged", "big": "oom"}, out
    assert "is nan" in reason(results, "nan") or "is inf" in reason(results, "nan")
    assert "init: " in reason(results, "big")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome", "hang_s", "message"),
    [
        (signal.SIGKILL, "error", 60, "rank 1 was killed by signal 9 (SIGKILL) at step"),
        (signal.SIGSTOP, "hang", 10, "rank 1 is stopped"),
    ],
)
def test_killed_or_stopped_real_rank_is_named(
    tmp_path: Path, number: int, outcome: str, hang_s: int, message: str
) -> None:
    body = '[[experiment]]\nname = "long"\ntraining.steps = 100000\nlayout.zero = 3'
    suite, results = write_suite(tmp_path, body, limits=f"hang_s = {hang_s}"), tmp_path / "results"
    process = start(suite, results, fake=False)
    with no_orphans(process) as ranks:
        heartbeat = folder_of(ranks[0]) / "heartbeat"
        wait_for(lambda: current_step(heartbeat) > 20 or process.poll() is not None, 120)
        os.kill(ranks[1].pid, number)
        code, _, _ = finish(process)
    assert code == 1
    assert outcomes(results) == {"long": outcome}
    found = reason(results, "long")
    assert message in found
    assert ", after " in found
    assert " in group " in found


def current_step(heartbeat: Path) -> int:
    """Return the step of rank 0, without a `HeartbeatReader`, which would reset the file."""
    raw = heartbeat.read_bytes() if heartbeat.exists() else b""
    return int(_PHASE.unpack_from(raw, 0)[2]) if raw else 0
