"""What is installed without extras runs and judges; what needs more names the extra that brings it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repro.config.files import read_toml
from repro.host.extras import EXTRAS
from tests.launch.runs import ROOT, write_suite

BLOCKER = f"""
import sys

OPTIONAL = {sorted(EXTRAS)}
COMMAND = ["typer", "rich", "scipy"]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        rank = "repro.launch.rank.program" in getattr(sys, "orig_argv", [])
        if name.partition(".")[0] in OPTIONAL + COMMAND * rank:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
PROGRAM = "import sys; from repro.cli import main; sys.exit(main())"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which no extra is installed, and of a rank not even what the command needs."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def repro(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_experiments_run_and_are_compared_without_extras(bare: dict[str, str], tmp_path: Path) -> None:
    """And a rank imports neither the command line nor statistics."""
    suite = write_suite(
        tmp_path,
        """
        [[experiment]]
        name = "a"
        layout = { dp = 2, zero = 1 }
        [[experiment]]
        name = "b"
        [[compare]]
        baseline = "a"
        subjects = ["b"]
        rounds = 2
        """,
        limits="hang_s = 60",
    )
    done = repro(bare, "run", suite, "--results", tmp_path / "results")
    assert done.returncode == 0, done.stderr + done.stdout
    for command in (["claims", "--results", tmp_path / "results"], ["models"], ["doctor"]):
        done = repro(bare, *command)
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 1), done.stderr


def test_a_command_names_the_extra_that_it_needs(bare: dict[str, str], tmp_path: Path) -> None:
    done = repro(bare, "report", "--results", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert re.fullmatch(r"error: \w+ is not installed: pip install -e '\.\[report\]'\n", done.stderr)


def test_extras_are_those_of_the_installation() -> None:
    extras = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    brought = {
        re.split(r"[<>=\[; ]", requirement)[0].removesuffix("-core").replace("-", "_"): extra
        for extra in ("report", "slurm", "lab", "text", "parquet", "engines")
        for requirement in extras[extra]
    }
    assert brought == EXTRAS
