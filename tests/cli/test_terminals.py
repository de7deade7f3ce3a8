"""Tests of commands with unusual streams and environments, which must not end in a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLI = "import sys; from repro.cli import main; sys.exit(main())"


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
    command = shlex.join([sys.executable, "-c", CLI])
    done = subprocess.run(
        ["sh", "-c", shell.format(repro=command)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert len(done.stderr.splitlines()) == (code == 1)


def test_warning_is_printed_as_a_note_in_one_line() -> None:
    program = (
        "import warnings; from repro import cli; cli.main(['--version']); warnings.warn('slow', stacklevel=1)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "note: slow\n"
