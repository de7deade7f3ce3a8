"""What pip installs: `kernels/` as `repro.kernels` with its CUDA sources, from a wheel and from a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from repro.kernels import families
from tests.kernels.test_cuda_compile import MISSING

ROOT = Path(__file__).parents[1]
PACKED = {
    "repro": "repro/",
    "kernels": "repro/kernels/",
    "examples": "repro/examples/",
    "suites": "repro/config/suites/files/",
    "slurm": "repro/config/suites/profiles/",
}
"""Folder of the checkout -> where a wheel has it."""
COMMAND = ("-c", "import sys; from repro.cli import main; sys.exit(main())")
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    """pip, which builds with the setuptools that is here and downloads nothing."""
    offline = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", *arguments, *offline, cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation is made of, in a folder of its own: a build leaves files beside it."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    pip("wheel", ".", "--wheel-dir", "dist", cwd=checkout)
    (made,) = (checkout / "dist").glob("*.whl")
    return made


def environment(folder: Path, what: Path, *how: str) -> Path:
    """The python of a virtual environment with an installation of `what`, which sees this one's other packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=what.parent)
    library = next(folder.glob("lib*/python*/site-packages"))
    pip("install", "--target", library, *how, what, cwd=what.parent)
    for other in Path(sysconfig.get_path("purelib")).iterdir():
        if "repro" not in other.name and not (library / other.name).exists():
            (library / other.name).symlink_to(other)
    return folder / "bin/python"


def test_a_wheel_has_every_file(checkout: Path, wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith("-info")}
    expected = {
        f"{prefix}{path.relative_to(checkout / name)}"
        for name, prefix in PACKED.items()
        for path in (checkout / name).rglob("*")
        if path.is_file() and path.name != "README.md" and (name != "slurm" or path.suffix == ".toml")
    }
    assert packed == expected


WHERE = "import repro.kernels.cuda.compile as found; print(found.__file__)"


COMPILED = """
from repro.kernels import families
from repro.kernels.cuda import compile as compiler
for program in families.example_programs():
    compiler.compile_cuda_program(program, compiler.CompileTarget("sm_80"))
    print(program.name)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_kernels_of_an_installed_wheel_compile(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel)
    assert Path(run(python, "-c", WHERE, cwd=tmp_path).strip()).is_relative_to(tmp_path / "venv")
    message = run(python, "-c", COMPILED, cwd=tmp_path, REPRO_KERNEL_CACHE=str(tmp_path / "cache"))
    assert message.splitlines() == [program.name for program in families.example_programs()]


@pytest.mark.slow
def test_a_wheel_answers_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Suites, models, systems and claims are inside: a suite runs by its name, and its claim is judged."""
    python = environment(tmp_path / "venv", wheel)
    here = tmp_path / "elsewhere"
    here.mkdir()
    found = run(python, "-c", "import repro.config.suites as p; print(p.SUITES.folder)", cwd=here).strip()
    assert Path(found).is_relative_to(tmp_path / "venv")
    message = run(python, *COMMAND, "run", "smoke", "--only", "states-z[03]-dp1", cwd=here)
    assert "all that can run here as expected" in message or "all as expected" in message
    judged = run(python, *COMMAND, "claims", "zero-mem-formula-stages", "--json", cwd=here)
    assert "measured" in judged
    traced = run(python, *COMMAND, "run", "yuan", "--evidence", "simulated", "--only", "rule-m480", cwd=here)
    assert "1 simulated experiment: 1 ok" in traced
    shown = run(
        python,
        *COMMAND,
        "submit",
        "zero_r",
        "--profile",
        "dgx2",
        "--only",
        "fig8-c4-60b",
        "--dry-run",
        cwd=here,
    )
    assert "Nothing is submitted." in shown


def test_a_checkout_needs_no_installation(checkout: Path, tmp_path: Path) -> None:
    """As where ranks are started from a shared folder, in whatever directory."""
    where = run(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert Path(where.strip()) == checkout / "kernels/cuda/compile.py"


@pytest.mark.slow
def test_an_editable_installation_finds_them_where_they_are(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", checkout, "--editable")
    where = run(python, "-c", WHERE, cwd=tmp_path)
    assert Path(where.strip()) == checkout / "kernels/cuda/compile.py"
