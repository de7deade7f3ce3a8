"""Tests of the command in the error about a missing extra: it installs the extra in every kind of installation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from repro.config.files import read_toml
from repro.util.extras import EXTRAS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("advice")]
ROOT = Path(__file__).parents[1]
LIBRARY = Path(sysconfig.get_path("purelib"))
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


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **variables},
        capture_output=True,
        text=True,
    )


def output(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    """Return a committed copy of the product's files, because a build writes files into its source folder."""
    folder = tmp_path_factory.mktemp("advice") / "checkout of mine"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("repro", "kernels", "examples", "suites", "slurm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    output("git", "init", "--quiet", cwd=folder)
    output("git", "add", ".", cwd=folder)
    author = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    output("git", *author, "commit", "--quiet", "-m", "all", cwd=folder)
    return folder


def link_packages(library: Path) -> None:
    """Link every package of this environment, except repro, pip and the optional packages, into `library`."""
    excluded = {"pip", "repro"}
    for name in OPTIONAL:
        excluded |= {file.parts[0] for file in metadata.distribution(name).files or []}
    for entry in LIBRARY.iterdir():
        if entry.name not in excluded and "repro" not in entry.name and not (library / entry.name).exists():
            (library / entry.name).symlink_to(entry)


def site_packages(python: Path) -> Path:
    (library,) = python.parents[1].glob("lib/python*/site-packages")
    return library


def pip_environment(folder: Path, *packages: str | Path) -> Path:
    """Return the python of a virtual environment in which pip has installed `packages`."""
    output(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin/python"
    for old in site_packages(python).glob("setuptools*"):  # Python 3.11 installs a too old version
        shutil.rmtree(old)
    link_packages(site_packages(python))
    if packages:
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        output(python, "-m", "pip", "install", *offline, *packages, cwd=folder.parent)
    return python


def install_wheel(checkout: Path, folder: Path) -> Path:
    """Install a wheel, and delete the wheel file."""
    python = pip_environment(folder)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder.parent)
    output(python, "-m", "pip", "wheel", *options, checkout, cwd=folder.parent)
    (wheel,) = folder.parent.glob("repro-*.whl")
    output(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder.parent)
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
    done = run(UV, "tool", "install", *options, checkout, cwd=folder.parent, **folders)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip(f"uv finds no setuptools for the build: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    python = folder / "repro/bin/python"
    link_packages(site_packages(python))
    return python


@pytest.mark.parametrize("install", [install_wheel, install_git, install_editable, add_to_path, install_uv])
def test_the_printed_command_installs_the_missing_extra(
    install: object, checkout: Path, index: dict[str, str], tmp_path: Path
) -> None:
    """The command runs in any folder without an activated environment."""
    assert callable(install)
    python = install(checkout, tmp_path / "an environment")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    repro = (python, "-c", "import sys; from repro.cli import main; sys.exit(main())")
    failed = run(*repro, "report", cwd=folder)
    lines = json.loads(output(python, "-c", HINTS_PROGRAM, cwd=folder))
    assert (failed.returncode, failed.stderr) == (2, f"error: {lines['report']}\n")
    assert not list(folder.iterdir())
    # The form of the command does not depend on the extra, so only one environment installs all extras.
    extras = SMALL_EXTRAS if install is install_wheel else ("slurm",)
    for extra in extras:
        line = lines[extra]
        output("sh", "-c", line.partition(f"Install the extra {extra}: ")[2], cwd=folder, **index)
    output(
        python, "-c", f"from repro.util.extras import require_extras; require_extras(*{extras})", cwd=folder
    )
