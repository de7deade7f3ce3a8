"""Tests of the command line: help, options, a start without large packages, exit codes, unusual and closed streams."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from repro import __version__, cli
from repro.cli.commands.options import LAYOUT
from repro.config import ConfigError, Layout
from repro.report.text import results
from repro.results.store import read_records
from tests.cli.samples import cases
from tests.launch.runs import FAKE, ROOT, experiments, write_suite

COMMANDS = tuple(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
REPRO = shlex.join([sys.executable, "-m", "repro"])
SCHEDULE = ["schedule", "--pp", "4", "--micro-batches", "8"]
DRY_RUN = ["run", "smoke", "--dry-run"]
LARGE = ("torch", "pandas", "scipy", "numpy", "matplotlib", "seaborn")
LIGHT = [*([name, "--help"] for name in COMMANDS), ["models"], ["systems"], ["claims"], SCHEDULE, DRY_RUN]
HELP = ["--help", "run --help", "lab up --help"]
CODES = {"models no-such-model": 2, "lab status": 3, "lab down": 3}
"""Exit codes other than 0."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def sh(line: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = ["bash", "-c", line]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_help_lists_the_commands_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_every_layout_key_has_an_option_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys without an option: dp, which follows from the GPUs; lists; and keys of other engines."""
    without = {"dp", "stage_layers", "offload_optimizer"}
    assert set(LAYOUT) == {field.name for field in fields(Layout)} - without
    assert cli.main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    shown = ("--no-recompute", "--zero1-reduce", "ranks of the first axis are consecutive", "Default: 1f1b.")
    assert all(words in out for words in shown)


def test_light_commands_import_no_large_package() -> None:
    """One process runs all commands in order, so the first command that imports a large package fails."""
    code = (
        "import json, sys\n"
        "import repro.cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    repro.cli.main(arguments)\n"
        f"    print('imported', arguments, *(name for name in {LARGE!r} if name in sys.modules), file=sys.stderr)"
    )
    message = python("-c", code, json.dumps(LIGHT)).stderr.splitlines()
    found = [line for line in message if line.startswith("imported")]
    assert found == [f"imported {arguments}" for arguments in LIGHT]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            ConfigError("layout.tp", 3, "a divisor of 4", file="s.toml"),
            2,
            "s.toml: layout.tp = 3: must be a d",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            PermissionError(13, "Permission denied", "results/records"),
            1,
            "results/records: Permission denied",
        ),
    ],
)
def test_exit_code_of_an_error(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(results, "print_run", Mock(side_effect=error))
    assert cli.main(["run", "s.toml"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", bool(message))
    assert message in err


def test_exit_code_is_the_return_value_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    print_run = Mock(return_value=1)
    monkeypatch.setattr(results, "print_run", print_run)
    assert cli.main(["run", "s.toml", "t.toml", "--only", "a*", "--only", "b", "--rerun", "--json"]) == 1
    suites, keys = [Path("s.toml"), Path("t.toml")], {"evidence": "measured", "system": "", "profile": False}
    print_run.assert_called_once_with(suites, ["a*", "b"], Path("results"), True, True, False, **keys)


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("COLUMNS=0 {repro} systems dgx2", 0),
        ("PYTHONIOENCODING=ascii {repro} schedule --pp 2 --micro-batches 2", 0),
        ("{repro} models >&-", 0),
        ("{repro} models nope 2>&-", 2),
        ("{repro} models > /dev/full", 1),
    ],
)
def test_unusual_streams_cause_no_traceback(shell: str, code: int, tmp_path: Path) -> None:
    done = sh(shell.format(repro=REPRO), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert len(done.stderr.splitlines()) == (code == 1)


@pytest.mark.parametrize(
    ("evidence", "pipe"),
    [("measured", "| true"), ("measured", "2>&1 >/dev/null | true"), ("simulated", "2>&1 | head -1")],
)
def test_all_experiments_run_after_the_pipe_is_closed(tmp_path: Path, evidence: str, pipe: str) -> None:
    suite, results = write_suite(tmp_path, experiments("a", "b", "c")), tmp_path / "results"
    line = f"{REPRO} run {suite} --evidence {evidence} --results {results} {pipe}; echo ${{PIPESTATUS[0]}}"
    done = sh(line, REPRO_RANK_TARGET=FAKE)
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr
    assert sorted(record.name for record in read_records(results)) == ["a", "b", "c"]


def test_closed_pipe_with_unbuffered_streams_has_no_error(tmp_path: Path) -> None:
    line = f'{REPRO} claims --json --results {tmp_path} | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = sh(line, PYTHONUNBUFFERED="1")
    assert (done.stdout, done.stderr) == ("{ 0\n", "")


@pytest.mark.parametrize("command", [*cases(all_samples=False), *HELP, "models no-such-model"])
def test_closed_pipe_keeps_the_exit_code_of_every_command(
    command: str, samples_folder: None, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed, monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", closed)
        streams.setattr(sys, "stderr", closed)
        code = cli.main(shlex.split(command.format(width="pipe")))
    assert code == CODES.get(command, 0)


def test_warning_is_printed_as_a_note_in_one_line() -> None:
    code = (
        "import warnings; from repro import cli; cli.main(['--version']); warnings.warn('slow', stacklevel=1)"
    )
    assert python("-c", code).stderr == "note: slow\n"


@pytest.mark.parametrize("arguments", [["claims", "--help"], SCHEDULE])
def test_benchmark_of_the_start_time(benchmark: Any, arguments: list[str]) -> None:
    code = f"import sys; from repro.cli import main; sys.exit(main({arguments!r}))"
    benchmark.pedantic(lambda: python("-c", code), rounds=5)
