"""A closed pipe ends the printing of a command, neither its work nor its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.results.store import read
from tests.launch.runs import FAKE, ROOT, experiments, write_suite

REPRO = f'"{sys.executable}" -c "import sys; from repro.cli import main; sys.exit(main())"'


@pytest.mark.parametrize("evidence", ["simulated", "measured"])
@pytest.mark.parametrize("pipe", ["2>&1 | head -1", "| true", "2>&1 >/dev/null | true"])
def test_all_experiments_run_after_the_reader_has_gone(tmp_path: Path, evidence: str, pipe: str) -> None:
    suite, results = write_suite(tmp_path, experiments("a", "b", "c")), tmp_path / "results"
    command = (
        f'{REPRO} run {suite} --evidence {evidence} --results {results} {pipe}; echo "${{PIPESTATUS[0]}}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPRO_RANK_TARGET": FAKE}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr
    assert sorted(record.name for record in read(results)) == ["a", "b", "c"]


def test_unbuffered_streams(tmp_path: Path) -> None:
    line = f'{REPRO} claims --json --results {tmp_path} | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{ 0\n", "")
