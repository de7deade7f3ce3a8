"""A visit to a GPU machine: order, limits, failures, early ends, results that are written at once, and their import."""

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

MINUTE = 1.0
KNOWN = {"experiment": tiny(Layout()).as_dict()}


def step(name: str, code: str, estimate_s: float = 0.0, limit_s: float = 60.0, **more: str) -> GpuDayStep:
    command = (sys.executable, "-c", code)
    return GpuDayStep(name, "a question", command, estimate_s, "a test", limit_s, **more)  # type: ignore[arg-type]


def visit(
    monkeypatch: pytest.MonkeyPatch, out: Path, steps: list[GpuDayStep], minutes: float = MINUTE
) -> dict[str, runner.StepOutcome]:
    """Run `steps` as a visit and return the outcomes by name, which are those of the file."""
    monkeypatch.setattr(runner, "gpu_day_steps", lambda places, rehearse: steps)
    found = run_gpu_day(GpuDayRequest(minutes, out, rehearse=True), lambda step, outcome: None)
    written = [line["outcome"] for line in read_json_lines(out / STEPS)]
    assert written == [outcome.outcome for outcome in found]
    return {outcome.name: outcome for outcome in found}


def test_no_failure_is_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [
        step("fails", "print('before'); raise SystemExit('what went wrong')"),
        step("hangs", "import time; time.sleep(1000)", limit_s=0.5),
        step("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        step("absent", "", missing="a tool"),
        step("last", "print('after')"),
    ]
    found = visit(monkeypatch, tmp_path / "out", steps)
    assert [found[s.name].outcome for s in steps] == ["failed", "timeout", "failed", "skipped", "ok"]
    assert found["fails"].reason == "exit code 1: what went wrong"
    assert "SIGKILL" in found["killed"].reason
    assert found["absent"].reason == "needs a tool"
    log = (tmp_path / "out" / LOG).read_text(encoding="utf-8")
    assert "before" in log
    assert "after" in log


def test_a_step_that_no_longer_fits_is_skipped_and_a_shorter_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = [step("long", "", estimate_s=100.0), step("short", "", estimate_s=1.0)]
    found = visit(monkeypatch, tmp_path / "out", steps)
    assert found["long"].outcome == "skipped"
    assert "needs about 100 s" in found["long"].reason
    assert found["short"].outcome == "ok"


def test_a_step_ends_with_the_visit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The limit of a step is at most the time that remains."""
    left_s = 1.0
    minutes = (runner.CLOSING_S + left_s) / 60
    found = visit(monkeypatch, tmp_path / "out", [step("hangs", "import time; time.sleep(1000)")], minutes)
    assert found["hangs"].outcome == "timeout"
    assert found["hangs"].limit_s <= left_s


def test_processes_of_a_step_end_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child that ignores SIGTERM and that the step leaves behind."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
    pid = tmp_path / "pid"
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(pid)!r}, 'w').write(str(p.pid))"
    )
    assert visit(monkeypatch, tmp_path / "out", [step("leaves", code)])["leaves"].outcome == "ok"
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


def test_records_are_there_before_the_step_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step waits until the visit has copied its record, and a torn line is not copied."""
    out = tmp_path / "out"
    line = json.dumps(made_up("one").as_dict())
    code = (
        "import os, time\n"
        "os.makedirs('results/records')\n"
        f"open('results/records/a.jsonl', 'w').write({line!r} + '\\n' + '{{\"torn')\n"
        f"while not os.path.exists({str(out / RECORDS)!r}): time.sleep(0.02)\n"
    )
    found = visit(monkeypatch, out, [step("writes", code)])
    assert (found["writes"].outcome, found["writes"].records) == ("ok", 1)
    assert (out / RECORDS).read_text(encoding="utf-8") == line + "\n"


def test_a_signal_names_the_steps_that_were_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stops = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(1000)"
    found = visit(monkeypatch, tmp_path / "out", [step("stops", stops), step("rest", "")])
    assert found["stops"].outcome == "interrupted"
    assert (found["rest"].outcome, found["rest"].reason) == ("skipped", "the session was interrupted")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_step_needs_the_file_of_a_previous_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = visit(monkeypatch, tmp_path / "out", [step("reads", "", needs_file="system.toml")])
    assert found["reads"].outcome == "skipped"


def test_caches_and_the_working_directory_are_temporary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = "import os, tempfile; print([os.getcwd(), os.environ['HOME'], tempfile.gettempdir()])"
    visit(monkeypatch, out, [step("places", code)])
    log = (out / LOG).read_text(encoding="utf-8")
    folders = json.loads(log.splitlines()[-1].replace("'", '"'))
    assert not any(Path(folder).exists() for folder in folders)
    assert sorted(path.name for path in out.iterdir()) == [LOG, STEPS]


def test_the_log_has_the_begin_and_the_end_of_a_long_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"print('begin'); print('x' * {2 * LOG_SHARE_BYTES}); print('end')"
    visit(monkeypatch, tmp_path / "out", [step("talks", code)])
    log = (tmp_path / "out" / LOG).read_bytes()
    assert b"\nbegin\n" in log
    assert log.endswith(b"\nend\n")
    assert len(log) < LOG_SHARE_BYTES + 1000


def test_a_result_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert append_durably(path, b"x" * MAX_FILE_BYTES)
    assert not append_durably(path, b"y")
    assert path.stat().st_size == MAX_FILE_BYTES


def test_a_rehearsal_has_the_same_steps_in_the_same_order(tmp_path: Path) -> None:
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
    """Every `repro run` of the table selects experiments of the suites that a visit writes."""
    from fnmatch import fnmatch

    from repro.config.suites import load_suite

    places = GpuDayPlaces(tmp_path / "out", tmp_path)
    write_suites(places, rehearse=rehearse)
    seen = 0
    for one in gpu_day_steps(places, rehearse=rehearse):
        if "--only" not in one.command:
            continue
        suite = load_suite(Path(one.command[one.command.index("run") + 1]))
        names = [entry.experiment.name for entry in suite.entries]
        globs = [after for word, after in zip(one.command, one.command[1:], strict=False) if word == "--only"]
        assert all(any(fnmatch(name, glob) for name in names) for glob in globs), one.name
        systems = {entry.experiment.system for entry in suite.entries}
        assert systems == {"local" if rehearse else "local-gpu"}
        seen += 1
    assert seen > 5


def test_bad_requests_are_refused(tmp_path: Path) -> None:
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


def test_a_dry_run_lists_every_step_and_its_basis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["gpu-day", "--dry-run", "--json", "--minutes", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [s.name for s in gpu_day_steps(GpuDayPlaces(tmp_path, tmp_path))]
    assert all(row["basis"] for row in rows)
    planned = sum(row["estimate_s"] for row in rows if row["plan"] == "starts")
    assert 0 < planned <= 2 * 60
    assert any(row["plan"] == "no longer fits" for row in rows)


def test_an_import_adds_records_once_and_says_what_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, results = tmp_path / "out", tmp_path / "results"
    with Store(results) as store:
        store.append(made_up("one", **KNOWN, id="a", metrics={"step_seconds.median": 2.0}))
    new = made_up("one", **KNOWN, id="b", metrics={"step_seconds.median": 1.0})
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


def test_an_import_of_another_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["gpu-day", "--import", str(tmp_path)]) == 2
    assert "name the --out folder of a `repro gpu-day` run" in capsys.readouterr().err


def test_concurrent_kernels_count_once() -> None:
    assert busy_seconds([(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]) == 4.0
