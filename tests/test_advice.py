"""The command that a missing extra is answered with installs the extra, however repro was installed."""

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
FOLLOWED = ("report", "slurm", "lab", "text", "parquet")
"""Extras whose packages are small; the command for engines is made of the same parts."""
OPTIONAL = [package.replace("_", "-") for package, extra in EXTRAS.items() if extra in FOLLOWED]
"""Distributions that those extras name."""
UV = shutil.which("uv")
MISSING = """
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
    """Variables that let pip and uv find the optional packages in wheels of what is installed here, offline."""
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
    """A committed copy of this working tree's product: a build leaves files in it."""
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


def borrow(library: Path) -> None:
    """Link every package of this environment, except repro, pip and the optional packages, into another one."""
    left_out = {"pip", "repro"}
    for name in OPTIONAL:
        left_out |= {file.parts[0] for file in metadata.distribution(name).files or []}
    for other in LIBRARY.iterdir():
        if other.name not in left_out and "repro" not in other.name and not (library / other.name).exists():
            (library / other.name).symlink_to(other)


def library_of(python: Path) -> Path:
    (library,) = python.parents[1].glob("lib/python*/site-packages")
    return library


def with_pip(folder: Path, *what: str | Path) -> Path:
    """Return the python of a virtual environment in which pip has installed `what`."""
    output(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin/python"
    for old in library_of(python).glob(
        "setuptools*"
    ):  # of Python 3.11 and older, too old for our pyproject.toml
        shutil.rmtree(old)
    borrow(library_of(python))
    if what:
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        output(python, "-m", "pip", "install", *offline, *what, cwd=folder.parent)
    return python


def from_wheel(checkout: Path, folder: Path) -> Path:
    """The wheel is deleted after its installation."""
    python = with_pip(folder)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder.parent)
    output(python, "-m", "pip", "wheel", *options, checkout, cwd=folder.parent)
    (wheel,) = folder.parent.glob("repro-*.whl")
    output(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder.parent)
    wheel.unlink()
    return python


def from_git(checkout: Path, folder: Path) -> Path:
    return with_pip(folder, f"git+{checkout.as_uri()}")


def editable(checkout: Path, folder: Path) -> Path:
    return with_pip(folder, "--editable", checkout)


def uninstalled(checkout: Path, folder: Path) -> Path:
    """The checkout is on the path and has no metadata."""
    python = with_pip(folder)
    (library_of(python) / "checkout.pth").write_text(f"{checkout}\n")
    return python


def uv_tool(checkout: Path, folder: Path) -> Path:
    """Without the packages that every installation needs, which are borrowed: torch is large."""
    if not UV:
        pytest.skip("uv is not on the path")
    project = read_toml(checkout / "pyproject.toml")["project"]
    never = [re.split("[<>=;]", line)[0] + "; sys_platform == 'never'" for line in project["dependencies"]]
    overrides = folder.parent / "overrides.txt"
    overrides.write_text("\n".join(never))
    places = {"UV_TOOL_DIR": str(folder), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    options = ("--quiet", "--python", sys.executable, "--overrides", overrides)
    done = run(UV, "tool", "install", *options, checkout, cwd=folder.parent, **places)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip(f"uv finds no setuptools, which builds: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    python = folder / "repro/bin/python"
    borrow(library_of(python))
    return python


@pytest.mark.parametrize("install", [from_wheel, from_git, editable, uninstalled, uv_tool])
def test_the_advice_installs_what_is_missing(
    install: object, checkout: Path, index: dict[str, str], tmp_path: Path
) -> None:
    """As copied from the terminal, in any folder and with no environment activated."""
    assert callable(install)
    python = install(checkout, tmp_path / "an environment")
    here = tmp_path / "elsewhere"
    here.mkdir()
    repro = (python, "-c", "import sys; from repro.cli import main; sys.exit(main())")
    failed = run(*repro, "report", cwd=here)
    lines = json.loads(output(python, "-c", MISSING, cwd=here))
    assert (failed.returncode, failed.stderr) == (2, f"error: {lines['report']}\n")
    assert not list(here.iterdir())
    # Packages of an extra come in the same way in every environment, so the large ones come once.
    followed = FOLLOWED if install is from_wheel else ("slurm",)
    for extra in followed:
        line = lines[extra]
        output("sh", "-c", line.partition(f"Install the extra {extra}: ")[2], cwd=here, **index)
    output(
        python, "-c", f"from repro.util.extras import require_extras; require_extras(*{followed})", cwd=here
    )
