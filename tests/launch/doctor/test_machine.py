"""Tests of `repro doctor`: the checks of this machine, their output and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro import cli
from repro.launch.doctor import machine
from repro.launch.doctor.machine import examine_machine


def test_this_machine_is_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without --details, passed checks are listed by name, and only failed and limited checks have a row."""
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--results", str(tmp_path), "--details"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Suites can be run here.\n")
    for words in ("\nyes      python", "data, tensor and ZeRO"):
        assert words in text
    checks = examine_machine(tmp_path)
    assert {check.name for check in checks} >= {
        *("python", "processor", "memory", "disk", "torch", "gloo", "CUDA", "NCCL", "kernels", "SLURM")
    }
    assert all(check.found and check.enables and check.state in ("yes", "limited", "no") for check in checks)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["doctor", "--results", str(tmp_path)]) == 0
    passed, _, rows = capsys.readouterr().out.partition("\n\n")
    for check in checks:
        assert check.state != "yes" or check.name in " ".join(passed.split())
        assert (f"\n{check.state:<9}{check.name} " in rows) == (check.state != "yes")


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["usable"]
    assert {"name", "state", "found", "enables", "fatal"} == set(document["checks"][0])


def test_doctor_fails_without_torch(tmp_path: Path) -> None:
    """A new interpreter is necessary, because modules of this process have imported torch."""
    program = (
        "import sys; sys.modules['torch'] = None; from repro import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "doctor", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "until these checks pass: torch" in done.stdout) == (1, True), done.stderr


def test_unwritable_results_folder_is_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine._disk(tmp_path / "file" / "results").fatal, "no folder can be below a file"
    assert not machine._disk(tmp_path / "results").fatal
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine._disk(tmp_path / "results").fatal


def test_slurm_version_is_read_from_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 23.11.4\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = machine._slurm()
    assert (check.state, check.found.split(",")[0]) == ("yes", "slurm 23.11.4")
