"""Tests of `make mutants`: its settings name existing files, and the tests of a file are ordered by import chain."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from repro.config.files import read_toml
from tests.mutants.relevant import ROOT, new_files_in_the_index, relevant, sources

SETTINGS = read_toml(ROOT / "tests/mutants/packages.toml")


def test_settings_name_existing_files_tests_and_lines() -> None:
    for name, package in SETTINGS["package"].items():
        assert all(list(ROOT.glob(pattern)) for pattern in package["files"]), name
        assert all((ROOT / test).exists() for test in package["tests"]), name
    assert all(re.compile(pattern) for pattern in SETTINGS["exclude"])
    for known in SETTINGS["same"]:
        files = [ROOT / known["file"]] if "file" in known else list((ROOT / "repro").rglob("*.py"))
        lines = [f"{name} = " for name in known["constants"]] if "constants" in known else [known["from"]]
        assert all(any(line in file.read_text() for file in files) for line in lines), known
        assert known["why"]


def test_tests_with_short_import_chains_come_first() -> None:
    found = relevant(
        Path("repro/simulate/time/interconnect.py"), ["tests/simulate", "tests/claims/test_expression.py"]
    )
    assert "tests/claims/test_expression.py" not in found
    assert found.index("tests/simulate/time/test_by_hand.py") < found.index(
        "tests/simulate/plan/test_plan.py"
    )
    kernel = relevant(Path("kernels/norm.py"), ["tests/kernels/test_norm.py", "tests/results/test_schema.py"])
    assert kernel == ["tests/kernels/test_norm.py"]


def test_tests_with_shared_fixtures_are_adjacent() -> None:
    """pytest finds the fixtures of a folder once; a test with a missing fixture would seem to detect every fault."""
    found = relevant(Path("repro/launch/runner.py"), ["tests/launch"])
    slurm = [index for index, test in enumerate(found) if Path(test).parent.name == "slurm"]
    assert len(slurm) > 5
    assert slurm == list(range(slurm[0], slurm[-1] + 1))
    assert slurm[-1] < len(found) - 1, "tests with longer import chains must follow"
    tests = ["tests/results/test_schema.py"]
    assert relevant(Path("repro/launch/rank/program.py"), tests) == tests, "no test imports a subprocess"


def test_untracked_files_count_as_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
        return subprocess.check_output(["git", *name, *words], cwd=tmp_path, text=True)

    git("init", "--quiet")
    for name in ("same.py", "other.py"):
        (tmp_path / name).write_text("one = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "Begin")
    (tmp_path / "other.py").write_text("one = 2\n")
    (tmp_path / "new.py").write_text("two = 2\n")
    assert sources(tmp_path, ["*.py"], None) == [Path("new.py"), Path("other.py"), Path("same.py")]
    assert sources(tmp_path, ["*.py"], "HEAD") == [Path("new.py"), Path("other.py")]
    assert "new.py" not in git("diff", "HEAD")
    with new_files_in_the_index(tmp_path):
        assert "+two = 2" in git("diff", "HEAD")
    assert git("status", "--short") == " M other.py\n?? new.py\n"
