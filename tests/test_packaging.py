"""Tests of installations from a wheel and from a checkout: `kernels/` is `repro.kernels` with its CUDA sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

from repro.kernels import families
from tests.kernels.test_cuda_compile import MISSING

ROOT = Path(__file__).parents[1]
WHEEL_PATHS = {
    "repro": "repro/",
    "kernels": "repro/kernels/",
    "examples": "repro/examples/",
    "suites": "repro/config/suites/files/",
    "slurm": "repro/config/suites/profiles/",
}
"""Path in a wheel, by folder of the checkout."""
COMMAND = ("-c", "import sys; from repro.cli import main; sys.exit(main())")
LOCATION_PROGRAM = "import repro.kernels.cuda.compile as found; print(found.__file__)"
COMPILE_PROGRAM = """
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
for program in families.example_programs():
    compiler.compile_cuda_program(program, compiler.CompileTarget("sm_80"))
    print(program.name)
"""


def completed(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with these variables, and without the packages on PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **variables}
    words = list(map(str, command))
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return the output of a command that must succeed."""
    done = completed(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path, python: str | Path = sys.executable) -> None:
    """Run pip with the installed setuptools and without downloads."""
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(python, "-m", "pip", *arguments, *offline, cwd=cwd)


def copy_sources(folder: Path) -> Path:
    """Copy the sources of an installation to a new folder, because a build writes files into it."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in WHEEL_PATHS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def link_packages(library: Path, excluded: Collection[str] = ()) -> None:
    """Link the packages of this environment except repro into `library`, which may have others."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in excluded and "repro" not in entry.name and not (library / entry.name).exists():
            (library / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("packaging") / "checkout")


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    pip("wheel", ".", "--wheel-dir", "dist", cwd=checkout)
    (wheel_file,) = (checkout / "dist").glob("*.whl")
    return wheel_file


def environment(folder: Path, source: Path, *options: str) -> Path:
    """Return the python of a virtual environment with `source` and links to this environment's other packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=source.parent)
    library = next(folder.glob("lib*/python*/site-packages"))
    pip("install", "--target", library, *options, source, cwd=source.parent)
    link_packages(library)
    return folder / "bin/python"


def test_a_wheel_has_all_files_of_the_product(checkout: Path, wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith("-info")}
    expected = {
        f"{prefix}{path.relative_to(checkout / name)}"
        for name, prefix in WHEEL_PATHS.items()
        for path in (checkout / name).rglob("*")
        if path.is_file() and path.name != "README.md" and (name != "slurm" or path.suffix == ".toml")
    }
    assert packed == expected


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_kernels_of_an_installed_wheel_compile(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel)
    assert Path(run(python, "-c", LOCATION_PROGRAM, cwd=tmp_path).strip()).is_relative_to(tmp_path / "venv")
    message = run(python, "-c", COMPILE_PROGRAM, cwd=tmp_path, REPRO_KERNEL_CACHE=str(tmp_path / "cache"))
    assert message.splitlines() == [program.name for program in families.example_programs()]


@pytest.mark.slow
def test_an_installed_wheel_needs_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """The wheel has suites, models, systems and claims: a suite runs by name, and its claim is judged."""
    python = environment(tmp_path / "venv", wheel)
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()
    found = run(python, "-c", "import repro.config.suites as p; print(p.SUITES.folder)", cwd=cwd).strip()
    assert Path(found).is_relative_to(tmp_path / "venv")
    message = run(python, *COMMAND, "run", "smoke", "--only", "states-z[03]-dp1", cwd=cwd)
    assert "all that can run here as expected" in message or "all as expected" in message
    assert "measured" in run(python, *COMMAND, "claims", "zero-mem-formula-stages", "--json", cwd=cwd)
    output = run(python, *COMMAND, "run", "yuan", "--evidence", "simulated", "--only", "rule-m480", cwd=cwd)
    assert "1 simulated experiment: 1 ok" in output
    submit = "submit zero_r --profile dgx2 --only fig8-c4-60b --dry-run"
    assert "Nothing is submitted." in run(python, *COMMAND, *submit.split(), cwd=cwd)


def test_a_checkout_needs_no_installation(checkout: Path, tmp_path: Path) -> None:
    """Ranks may start from a checkout in a shared folder, in any working directory."""
    location = run(sys.executable, "-c", LOCATION_PROGRAM, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert Path(location.strip()) == checkout / "kernels/cuda/compile.py"


@pytest.mark.slow
def test_an_editable_installation_uses_the_kernels_of_the_checkout(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", checkout, "--editable")
    location = run(python, "-c", LOCATION_PROGRAM, cwd=tmp_path)
    assert Path(location.strip()) == checkout / "kernels/cuda/compile.py"
