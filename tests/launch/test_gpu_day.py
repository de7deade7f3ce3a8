"""Tests of `repro gpu-day`."""

from __future__ import annotations

import json
import os
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from repro import cli
from repro.config import ConfigError, Layout
from repro.config.suites import load_suite
from repro.launch.gpu_day import result_files as files
from repro.launch.gpu_day import runner
from repro.launch.gpu_day.runner import GpuDayRequest, parse_faults, run_gpu_day
from repro.launch.gpu_day.step_probe import busy_seconds
from repro.launch.gpu_day.steps import GpuDayPlaces, GpuDayStep, gpu_day_steps, write_suites
from repro.launch.rank_process import process_state
from repro.results.store import Store
from tests.launch.runs import wait_for
from tests.records import made_up
from tests.training import tiny

EXPERIMENT = {"experiment": tiny(Layout()).as_dict()}
HANGS = "import time; time.sleep(1000)"


def step(name: str, code: str, estimate_s: float = 0.0, limit_s: float = 60.0, **more: str) -> GpuDayStep:
    command = (sys.executable, "-c", code)
    return GpuDayStep(name, "a question", command, estimate_s, "a test", limit_s, **more)  # type: ignore[arg-type]


def run_day(
    monkeypatch: pytest.MonkeyPatch, out: Path, steps: list[GpuDayStep], minutes: float = 10.0
) -> dict[str, runner.StepOutcome]:
    """Run `steps` as a GPU day, check the outcomes in the file, and return the outcomes by name."""
    monkeypatch.setattr(runner, "gpu_day_steps", lambda places, rehearse: steps)
    found = run_gpu_day(GpuDayRequest(minutes, out, rehearse=True), lambda step, outcome: None)
    written = [line["outcome"] for line in files.read_json_lines(out / files.STEPS)]
    assert written == [outcome.outcome for outcome in found]
    return {outcome.name: outcome for outcome in found}


def test_failed_and_skipped_steps_do_not_end_the_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = "import os, tempfile; print([os.getcwd(), os.environ['HOME'], tempfile.gettempdir()])"
    steps = [
        step("fails", "print('before'); raise SystemExit('what went wrong')"),
        step("hangs", HANGS, limit_s=0.5),
        step("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        step("absent", "", missing="a tool"),
        step("reads", "", needs_file="system.toml"),
        step("long", "", estimate_s=1000.0),
        step("talks", f"print('begin'); print('x' * {2 * files.LOG_SHARE_BYTES}); print('end')"),
        step("places", places, estimate_s=1.0),
    ]
    found = run_day(monkeypatch, tmp_path / "out", steps)
    ends = [(outcome.outcome, outcome.reason) for outcome in found.values()]
    seconds = ends[5][1].removeprefix("the step needs about 1000 s, but ").removesuffix(" s remain")
    assert ends == [
        ("failed", "exit code 1: what went wrong"),
        ("timeout", "timeout after 0 s"),
        ("failed", "signal SIGKILL"),
        ("skipped", "needs a tool"),
        ("skipped", "the step needs the file system.toml, which no previous step wrote"),
        ("skipped", f"the step needs about 1000 s, but {int(seconds)} s remain"),
        ("ok", ""),
        ("ok", ""),
    ]
    log = (tmp_path / "out" / files.LOG).read_text(encoding="utf-8")
    assert "before" in log
    assert "\nbegin\n" in log
    assert "\nend\n" in log, "the log retains the end of a long output"
    assert len(log) < files.LOG_SHARE_BYTES + 3000
    folders = json.loads(log.splitlines()[-1].replace("'", '"'))
    assert not any(Path(folder).exists() for folder in folders), "folders of steps are temporary"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [files.LOG, files.STEPS]


def test_step_limit_is_at_most_the_remaining_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left_s = 1.0
    minutes = (runner.CLOSING_S + left_s) / 60
    found = run_day(monkeypatch, tmp_path / "out", [step("hangs", HANGS)], minutes)
    assert found["hangs"].outcome == "timeout"
    assert found["hangs"].limit_s <= left_s


def test_child_processes_end_with_their_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child ignores SIGTERM, and the step exits before the child."""
    child = f"import signal; signal.signal(15, signal.SIG_IGN); {HANGS}"
    pid = tmp_path / "pid"
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(pid)!r}, 'w').write(str(p.pid))"
    )
    assert run_day(monkeypatch, tmp_path / "out", [step("leaves", code)])["leaves"].outcome == "ok"
    wait_for(lambda: not process_state(int(pid.read_text())))


def test_records_are_copied_before_the_step_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step waits until its record is copied. The incomplete line is not copied."""
    out = tmp_path / "out"
    line = json.dumps(made_up("one").as_dict())
    code = (
        "import os, time\n"
        "os.makedirs('results/records')\n"
        f"open('results/records/a.jsonl', 'w').write({line!r} + '\\n' + '{{\"torn')\n"
        f"while not os.path.exists({str(out / files.RECORDS)!r}): time.sleep(0.02)\n"
    )
    found = run_day(monkeypatch, out, [step("writes", code)])
    assert (found["writes"].outcome, found["writes"].records) == ("ok", 1)
    assert (out / files.RECORDS).read_text(encoding="utf-8") == line + "\n"


def test_steps_after_a_signal_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stops = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); {HANGS}"
    found = run_day(monkeypatch, tmp_path / "out", [step("stops", stops), step("rest", "")])
    assert found["stops"].outcome == "interrupted"
    assert (found["rest"].outcome, found["rest"].reason) == ("skipped", "the session was interrupted")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_result_file_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert files.append_durably(path, b"x" * files.MAX_FILE_BYTES)
    assert not files.append_durably(path, b"y")
    assert path.stat().st_size == files.MAX_FILE_BYTES


def test_rehearsal_has_the_same_steps_in_the_same_order(tmp_path: Path) -> None:
    places = GpuDayPlaces(tmp_path / "out", tmp_path)
    real, rehearsed = gpu_day_steps(places), gpu_day_steps(places, rehearse=True)
    names = [step.name for step in real]
    assert names == [step.name for step in rehearsed]
    assert len(set(names)) == len(names)
    assert all(s.basis and s.estimate_s > 0 and s.limit_s > s.estimate_s for s in real)
    out = f"{places.out}/"
    named = {word.removeprefix(out) for s in real for word in s.command if word.startswith(out)}
    assert named
    assert named <= set(files.FILES)


@pytest.mark.parametrize("rehearse", [False, True])
def test_commands_name_existing_experiments(rehearse: bool, tmp_path: Path) -> None:
    """Every `repro run` of the steps selects experiments of the suites that the GPU day writes."""
    places = GpuDayPlaces(tmp_path / "out", tmp_path)
    write_suites(places, rehearse=rehearse)
    run_count = 0
    for row in gpu_day_steps(places, rehearse=rehearse):
        if "--only" not in row.command:
            continue
        suite = load_suite(Path(row.command[row.command.index("run") + 1]))
        names = [entry.experiment.name for entry in suite.entries]
        globs = [after for word, after in zip(row.command, row.command[1:], strict=False) if word == "--only"]
        assert all(any(fnmatch(name, glob) for name in names) for glob in globs), row.name
        systems = {entry.experiment.system for entry in suite.entries}
        assert systems == {"local" if rehearse else "local-gpu"}
        run_count += 1
    assert run_count > 5


def test_invalid_requests_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    requests = {
        "new or empty folder": GpuDayRequest(1, tmp_path, rehearse=True),
        "--minutes": GpuDayRequest(0, tmp_path / "out", rehearse=True),
        "needs --rehearse": GpuDayRequest(1, tmp_path / "out", faults={"facts": "fail"}),
        "one of facts": GpuDayRequest(1, tmp_path / "out", rehearse=True, only=["nothing"]),
    }
    for message, request in requests.items():
        with pytest.raises(ConfigError, match=message):
            run_gpu_day(request, lambda step, outcome: None)
    with pytest.raises(ConfigError, match="STEP=fail"):
        parse_faults(["facts=explode"])


def test_dry_run_lists_every_step_and_its_basis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["gpu-day", "--dry-run", "--json", "--minutes", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [s.name for s in gpu_day_steps(GpuDayPlaces(tmp_path, tmp_path))]
    assert all(row["basis"] for row in rows)
    planned_s = sum(row["estimate_s"] for row in rows if row["plan"] == "starts")
    assert 0 < planned_s <= 2 * 60
    assert any(row["plan"] == "no longer fits" for row in rows)


def test_import_adds_and_compares_new_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    with Store(results) as store:
        store.append(made_up("one", **EXPERIMENT, id="a", metrics={"step_seconds.median": 2.0}))
    new = made_up("one", **EXPERIMENT, id="b", metrics={"step_seconds.median": 1.0})
    files.append_durably(out / files.RECORDS, json.dumps(new.as_dict()).encode() + b"\n")
    files.append_durably(
        out / files.STEPS, b'{"name": "facts", "outcome": "failed", "reason": "exit code 1"}\n'
    )
    files.append_measurement(out / files.MEASUREMENTS, "plain", step_s=0.5)
    assert cli.main(["gpu-day", "--import", str(out), "--results", str(results), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["new_records"]
    assert (row["step_s"], row["earlier_step_s"]) == (1.0, 2.0)
    assert document["measurements"] == [{"name": "plain", "step_s": 0.5}]
    assert cli.main(["gpu-day", "--import", str(out), "--results", str(results)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 new records" in text
    assert "it already had 1 others" in text
    assert "facts: failed: exit code 1" in text
    assert len(Store(results).records()) == 2
    assert cli.main(["gpu-day", "--import", str(tmp_path)]) == 2
    assert "name the --out folder of a `repro gpu-day` run" in capsys.readouterr().err


def test_busy_seconds_count_concurrent_kernels_once() -> None:
    assert busy_seconds([(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]) == 4.0
