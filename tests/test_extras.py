"""Tests of an installation without extras: commands name the missing extra and the command that installs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from repro.config.files import read_toml
from repro.util import extras
from repro.util.extras import EXTRAS
from tests.launch.runs import ROOT, write_suite
from tests.test_packaging import COMMAND, completed, copy_sources, link_packages, pip, run

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
    two = '[[experiment]]\nname = "a"\nlayout = { dp = 2, zero = 1 }\n[[experiment]]\nname = "b"\n'
    compare = '[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 2\n'
    suite = write_suite(tmp_path, two + compare)
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


SMALL_EXTRAS = ("report", "slurm", "lab", "text", "parquet")
"""Extras with small packages. The command for the extra `engines` has the same form."""
OPTIONAL = [package.replace("_", "-") for package, extra in EXTRAS.items() if extra in SMALL_EXTRAS]
"""Distributions that these extras require."""
UV = shutil.which("uv")
HINTS_PROGRAM = """
import json
from repro.util.extras import EXTRAS, missing_package_hint
print(json.dumps({EXTRAS[package]: missing_package_hint(package) for package in reversed(EXTRAS)}))
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pack the installed optional packages into wheels; return the variables with which pip and uv find only these."""
    folder = tmp_path_factory.mktemp("index")
    for name in OPTIONAL:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here: it is in the extra test")
        (tag, *_) = re.findall(r"^Tag: (.+)$", found.read_text("WHEEL") or "", re.MULTILINE)
        wheel = folder / f"{name.replace('-', '_')}-{found.version}-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for file in found.files or []:
                if file.parts[0] != ".." and "__pycache__" not in file.parts:
                    archive.write(str(file.locate()), str(file))
    offline = {"NO_INDEX": "1", "FIND_LINKS": str(folder)}
    return {f"{tool}_{key}": value for tool in ("PIP", "UV") for key, value in offline.items()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a committed copy of the product's files."""
    folder = copy_sources(tmp_path_factory.mktemp("advice") / "checkout of mine")
    author = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "all")):
        run("git", *words, cwd=folder)
    return folder


def site_packages(python: Path) -> Path:
    (library,) = python.parents[1].glob("lib/python*/site-packages")
    return library


def link_required_packages(library: Path) -> None:
    """Link every package of this environment, except repro, pip and the optional packages, into `library`."""
    optional = {file.parts[0] for name in OPTIONAL for file in metadata.distribution(name).files or []}
    link_packages(library, {"pip", *optional})


def pip_environment(folder: Path, *packages: str | Path) -> Path:
    """Return the python of a virtual environment in which pip has installed `packages`."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin/python"
    for old in site_packages(python).glob("setuptools*"):  # Python 3.11 installs a too old version
        shutil.rmtree(old)
    link_required_packages(site_packages(python))
    if packages:
        pip("install", *packages, python=python, cwd=folder.parent)
    return python


def install_wheel(checkout: Path, folder: Path) -> Path:
    """Install a wheel, and delete the wheel file."""
    python = pip_environment(folder)
    pip("wheel", "--wheel-dir", folder.parent, checkout, python=python, cwd=folder.parent)
    (wheel,) = folder.parent.glob("repro-*.whl")
    pip("install", wheel, python=python, cwd=folder.parent)
    wheel.unlink()
    return python


def install_git(checkout: Path, folder: Path) -> Path:
    return pip_environment(folder, f"git+{checkout.as_uri()}")


def install_editable(checkout: Path, folder: Path) -> Path:
    return pip_environment(folder, "--editable", checkout)


def add_to_path(checkout: Path, folder: Path) -> Path:
    """Add the checkout to the path, without metadata of an installation."""
    python = pip_environment(folder)
    (site_packages(python) / "checkout.pth").write_text(f"{checkout}\n")
    return python


def install_uv(checkout: Path, folder: Path) -> Path:
    """Install with `uv tool`; link the required packages instead of installing them, because torch is large."""
    if not UV:
        pytest.skip("uv is not on the path")
    project = read_toml(checkout / "pyproject.toml")["project"]
    none = [re.split("[<>=;]", line)[0] + "; sys_platform == 'never'" for line in project["dependencies"]]
    overrides = folder.parent / "overrides.txt"
    overrides.write_text("\n".join(none))
    folders = {"UV_TOOL_DIR": str(folder), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    options = ("--quiet", "--python", sys.executable, "--overrides", overrides)
    done = completed(UV, "tool", "install", *options, checkout, cwd=folder.parent, **folders)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip(f"uv finds no setuptools for the build: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    python = folder / "repro/bin/python"
    link_required_packages(site_packages(python))
    return python


@pytest.mark.slow
@pytest.mark.xdist_group("advice")
@pytest.mark.parametrize("install", [install_wheel, install_git, install_editable, add_to_path, install_uv])
def test_the_printed_command_installs_the_missing_extra(
    install: Callable[[Path, Path], Path], checkout: Path, index: dict[str, str], tmp_path: Path
) -> None:
    """The command runs in any folder without an activated environment."""
    python = install(checkout, tmp_path / "an environment")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    failed = completed(python, *COMMAND, "report", cwd=folder)
    lines = json.loads(run(python, "-c", HINTS_PROGRAM, cwd=folder))
    assert (failed.returncode, failed.stderr) == (2, f"error: {lines['report']}\n")
    assert not list(folder.iterdir())
    # The form of the command does not depend on the extra, so only one environment installs all extras.
    extras = SMALL_EXTRAS if install is install_wheel else ("slurm",)
    for extra in extras:
        run("sh", "-c", lines[extra].partition(f"Install the extra {extra}: ")[2], cwd=folder, **index)
    check = f"from repro.util.extras import require_extras; require_extras(*{extras})"
    run(python, "-c", check, cwd=folder)
