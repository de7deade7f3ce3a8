"""Tests of `repro gpu-day`: step order, limits, failures, interrupts, durable results and their import."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from repro import cli
from repro.config import ConfigError, Layout
from repro.launch.gpu_day import runner
from repro.launch.gpu_day.result_files import (
    FILES,
    LOG,
    LOG_SHARE_BYTES,
    MAX_FILE_BYTES,
    MEASUREMENTS,
    RECORDS,
    STEPS,
    append_durably,
    append_measurement,
    read_json_lines,
)
from repro.launch.gpu_day.runner import GpuDayRequest, parse_faults, planned_steps, run_gpu_day
from repro.launch.gpu_day.step_probe import busy_seconds
from repro.launch.gpu_day.steps import GpuDayPlaces, GpuDayStep, gpu_day_steps, write_suites
from repro.results.store import Store
from tests.records import made_up
from tests.training import tiny

MINUTES = 1.0
EXPERIMENT = {"experiment": tiny(Layout()).as_dict()}


def step(name: str, code: str, estimate_s: float = 0.0, limit_s: float = 60.0, **more: str) -> GpuDayStep:
    command = (sys.executable, "-c", code)
    return GpuDayStep(name, "a question", command, estimate_s, "a test", limit_s, **more)  # type: ignore[arg-type]


def run_day(
    monkeypatch: pytest.MonkeyPatch, out: Path, steps: list[GpuDayStep], minutes: float = MINUTES
) -> dict[str, runner.StepOutcome]:
    """Run `steps` as a GPU day, check the outcomes in the file, and return the outcomes by name."""
    monkeypatch.setattr(runner, "gpu_day_steps", lambda places, rehearse: steps)
    found = run_gpu_day(GpuDayRequest(minutes, out, rehearse=True), lambda step, outcome: None)
    written = [line["outcome"] for line in read_json_lines(out / STEPS)]
    assert written == [outcome.outcome for outcome in found]
    return {outcome.name: outcome for outcome in found}


def test_failed_steps_do_not_end_the_gpu_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [
        step("fails", "print('before'); raise SystemExit('what went wrong')"),
        step("hangs", "import time; time.sleep(1000)", limit_s=0.5),
        step("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        step("absent", "", missing="a tool"),
        step("last", "print('after')"),
    ]
    found = run_day(monkeypatch, tmp_path / "out", steps)
    assert [found[s.name].outcome for s in steps] == ["failed", "timeout", "failed", "skipped", "ok"]
    assert found["fails"].reason == "exit code 1: what went wrong"
    assert "SIGKILL" in found["killed"].reason
    assert found["absent"].reason == "needs a tool"
    log = (tmp_path / "out" / LOG).read_text(encoding="utf-8")
    assert "before" in log
    assert "after" in log


def test_steps_longer_than_the_remaining_time_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = [step("long", "", estimate_s=100.0), step("short", "", estimate_s=1.0)]
    found = run_day(monkeypatch, tmp_path / "out", steps)
    assert found["long"].outcome == "skipped"
    assert "needs about 100 s" in found["long"].reason
    assert found["short"].outcome == "ok"


def test_step_limit_is_at_most_the_remaining_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left_s = 1.0
    minutes = (runner.CLOSING_S + left_s) / 60
    found = run_day(monkeypatch, tmp_path / "out", [step("hangs", "import time; time.sleep(1000)")], minutes)
    assert found["hangs"].outcome == "timeout"
    assert found["hangs"].limit_s <= left_s


def test_child_processes_end_with_their_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child ignores SIGTERM, and the step exits before the child."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
    pid = tmp_path / "pid"
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(pid)!r}, 'w').write(str(p.pid))"
    )
    assert run_day(monkeypatch, tmp_path / "out", [step("leaves", code)])["leaves"].outcome == "ok"
    deadline = time.monotonic() + 60
    while _is_running(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_records_are_copied_before_the_step_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step waits until its record is copied. The incomplete line is not copied."""
    out = tmp_path / "out"
    line = json.dumps(made_up("one").as_dict())
    code = (
        "import os, time\n"
        "os.makedirs('results/records')\n"
        f"open('results/records/a.jsonl', 'w').write({line!r} + '\\n' + '{{\"torn')\n"
        f"while not os.path.exists({str(out / RECORDS)!r}): time.sleep(0.02)\n"
    )
    found = run_day(monkeypatch, out, [step("writes", code)])
    assert (found["writes"].outcome, found["writes"].records) == ("ok", 1)
    assert (out / RECORDS).read_text(encoding="utf-8") == line + "\n"


def test_steps_after_a_signal_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stops = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(1000)"
    found = run_day(monkeypatch, tmp_path / "out", [step("stops", stops), step("rest", "")])
    assert found["stops"].outcome == "interrupted"
    assert (found["rest"].outcome, found["rest"].reason) == ("skipped", "the session was interrupted")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_step_without_its_required_file_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run_day(monkeypatch, tmp_path / "out", [step("reads", "", needs_file="system.toml")])
    assert found["reads"].outcome == "skipped"


def test_home_and_working_directory_of_steps_are_temporary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = "import os, tempfile; print([os.getcwd(), os.environ['HOME'], tempfile.gettempdir()])"
    run_day(monkeypatch, out, [step("places", code)])
    log = (out / LOG).read_text(encoding="utf-8")
    folders = json.loads(log.splitlines()[-1].replace("'", '"'))
    assert not any(Path(folder).exists() for folder in folders)
    assert sorted(path.name for path in out.iterdir()) == [LOG, STEPS]


def test_log_retains_beginning_and_end_of_long_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"print('begin'); print('x' * {2 * LOG_SHARE_BYTES}); print('end')"
    run_day(monkeypatch, tmp_path / "out", [step("talks", code)])
    log = (tmp_path / "out" / LOG).read_bytes()
    assert b"\nbegin\n" in log
    assert log.endswith(b"\nend\n")
    assert len(log) < LOG_SHARE_BYTES + 1000


def test_result_file_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert append_durably(path, b"x" * MAX_FILE_BYTES)
    assert not append_durably(path, b"y")
    assert path.stat().st_size == MAX_FILE_BYTES


def test_rehearsal_has_the_same_steps_in_the_same_order(tmp_path: Path) -> None:
    places = GpuDayPlaces(tmp_path / "out", tmp_path)
    real, rehearsed = gpu_day_steps(places), gpu_day_steps(places, rehearse=True)
    assert [s.name for s in real] == [s.name for s in rehearsed]
    assert all(s.basis and s.estimate_s > 0 and s.limit_s > s.estimate_s for s in real)
    assert len({s.name for s in real}) == len(real)
    out = f"{places.out}/"
    named = {word.removeprefix(out) for s in real for word in s.command if word.startswith(out)}
    assert named
    assert named <= set(FILES)


@pytest.mark.parametrize("rehearse", [False, True])
def test_commands_name_existing_experiments(rehearse: bool, tmp_path: Path) -> None:
    """Every `repro run` of the steps selects experiments of the suites that the GPU day writes."""
    from fnmatch import fnmatch

    from repro.config.suites import load_suite

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

    def ignore(step: GpuDayStep, outcome: object) -> None:
        pass

    with pytest.raises(ConfigError, match="new or empty folder"):
        run_gpu_day(GpuDayRequest(1, tmp_path, rehearse=True), ignore)
    with pytest.raises(ConfigError, match="--minutes"):
        run_gpu_day(GpuDayRequest(0, tmp_path / "out", rehearse=True), ignore)
    with pytest.raises(ConfigError, match="needs --rehearse"):
        GpuDayRequest(1, tmp_path, faults={"facts": "fail"}).check()
    with pytest.raises(ConfigError, match="STEP=fail"):
        parse_faults(["facts=explode"])
    with pytest.raises(ConfigError, match="one of facts"):
        planned_steps(GpuDayRequest(1, tmp_path, only=["nothing"]), tmp_path)


def test_dry_run_lists_every_step_and_its_basis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["gpu-day", "--dry-run", "--json", "--minutes", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [s.name for s in gpu_day_steps(GpuDayPlaces(tmp_path, tmp_path))]
    assert all(row["basis"] for row in rows)
    planned_s = sum(row["estimate_s"] for row in rows if row["plan"] == "starts")
    assert 0 < planned_s <= 2 * 60
    assert any(row["plan"] == "no longer fits" for row in rows)


def test_import_adds_records_once_and_compares_step_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    with Store(results) as store:
        store.append(made_up("one", **EXPERIMENT, id="a", metrics={"step_seconds.median": 2.0}))
    new = made_up("one", **EXPERIMENT, id="b", metrics={"step_seconds.median": 1.0})
    append_durably(out / RECORDS, json.dumps(new.as_dict()).encode() + b"\n")
    append_durably(out / STEPS, b'{"name": "facts", "outcome": "failed", "reason": "exit code 1"}\n')
    append_measurement(out / MEASUREMENTS, "plain", step_s=0.5)
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


def test_import_rejects_folders_without_a_gpu_day(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["gpu-day", "--import", str(tmp_path)]) == 2
    assert "name the --out folder of a `repro gpu-day` run" in capsys.readouterr().err


def test_busy_seconds_count_concurrent_kernels_once() -> None:
    assert busy_seconds([(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]) == 4.0
