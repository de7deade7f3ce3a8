"""Tests of an installation without extras: experiments and claims work, and other commands name the missing extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repro.config.files import read_toml
from repro.util import extras
from repro.util.extras import EXTRAS
from tests.launch.runs import ROOT, write_suite
from tests.test_packaging import COMMAND

BLOCKER = f"""
import sys

OPTIONAL = {sorted(EXTRAS)}
COMMAND_LINE = ["typer", "rich", "scipy"]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        rank = "repro.launch.rank.program" in getattr(sys, "orig_argv", [])
        if name.partition(".")[0] in OPTIONAL + COMMAND_LINE * rank:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return an environment without the extras' packages; ranks also lack the packages of the command line."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def repro(
    environment: dict[str, str], *arguments: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_experiments_run_and_are_compared_without_extras(bare: dict[str, str], tmp_path: Path) -> None:
    """A rank imports neither the packages of the command line nor scipy."""
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


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("report", ("report", "--out", "out")),
        ("notebooks", ("report", "--notebooks", "--out", "out")),
        ("report", ("export", "--output", "out")),
        ("slurm", ("submit", ROOT / "suites/smoke.toml", "--profile", ROOT / "slurm/lab.toml")),
    ],
)
def test_a_command_names_its_missing_extra(
    bare: dict[str, str], tmp_path: Path, extra: str, command: tuple[str | Path, ...]
) -> None:
    """The error is one line, and the command writes no file."""
    if extra == "notebooks":  # the other packages of this extra are installed
        blocker = tmp_path / "blocked/sitecustomize.py"
        blocker.write_text(blocker.read_text().replace(str(sorted(EXTRAS)), "['jupytext']"))
    (tmp_path / "here").mkdir()
    done = repro(bare, *command, cwd=tmp_path / "here")
    installation = re.escape(extras.installation(extra))
    error = rf"error: \w+ is not installed\. Install the extra {extra}: {installation}\n"
    assert re.fullmatch(error, done.stderr)
    assert done.returncode == 2
    assert not list((tmp_path / "here").iterdir())


def test_requirements_equal_those_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata and the checkout give the same requirements, except for the order of a version range."""

    def parts(requirements: list[str]) -> list[list[str]]:
        return [sorted(re.split(r"[,<>=]+", requirement)) for requirement in requirements]

    installed = {extra: parts(extras.requirements(extra)) for extra in set(EXTRAS.values())}
    assert all(installed.values())
    monkeypatch.setattr(extras.metadata, "requires", lambda name: None)
    assert {extra: parts(extras.requirements(extra)) for extra in installed} == installed


def test_extras_name_the_packages_of_pyproject() -> None:
    listed = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    packages = {
        re.split(r"[<>=\[; ]", requirement)[0].removesuffix("-core").replace("-", "_"): extra
        for extra in ("report", "slurm", "lab", "text", "parquet", "engines")
        for requirement in listed[extra]
    }
    packages |= dict.fromkeys(("jupytext", "nbclient", "nbconvert", "ipykernel", "ipywidgets"), "notebooks")
    assert packages | {"yaml": "yaml"} == EXTRAS  # the package is pyyaml
