"""Tests of commands on a closed pipe: printing ends, but the work continues and the exit code is unchanged."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repro import cli
from repro.results.store import read_records
from tests.cli.samples import cases
from tests.launch.runs import FAKE, ROOT, experiments, write_suite

HELP = ["--help", "run --help", "lab up --help"]
CODES = {"models no-such-model": 2, "lab status": 3, "lab down": 3}
"""Exit codes other than 0."""
REPRO = f'"{sys.executable}" -m repro'


def bash(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("evidence", "pipe"),
    [("measured", "| true"), ("measured", "2>&1 >/dev/null | true"), ("simulated", "2>&1 | head -1")],
)
def test_all_experiments_run_after_the_pipe_is_closed(tmp_path: Path, evidence: str, pipe: str) -> None:
    suite, results = write_suite(tmp_path, experiments("a", "b", "c")), tmp_path / "results"
    arguments = f"run {suite} --evidence {evidence} --results {results} {pipe}"
    done = bash(f'{REPRO} {arguments}; echo "${{PIPESTATUS[0]}}"', REPRO_RANK_TARGET=FAKE)
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr
    assert sorted(record.name for record in read_records(results)) == ["a", "b", "c"]


def test_closed_pipe_with_unbuffered_streams_has_no_error(tmp_path: Path) -> None:
    line = f'{REPRO} claims --json --results {tmp_path} | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = bash(line, PYTHONUNBUFFERED="1")
    assert (done.stdout, done.stderr) == ("{ 0\n", "")


@pytest.mark.parametrize("command", [*cases(all_samples=False), *HELP, "models no-such-model"])
def test_closed_pipe_keeps_the_exit_code_of_every_command(
    command: str, samples_folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(samples_folder)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as closed, monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", closed)
        streams.setattr(sys, "stderr", closed)
        code = cli.main(shlex.split(command.format(width="pipe")))
    assert code == CODES.get(command, 0)
