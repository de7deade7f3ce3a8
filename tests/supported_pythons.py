"""Run a part of the tests with each Python version that pyproject.toml names and this machine has.

In a new environment, one training of two processes runs with the core of the suite. The tests run with the extras.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from repro.config.files import read_toml

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "pythons"
TESTS = ("tests/config", "tests/cli", "tests/claims")
TEST_PACKAGES = re.compile(r"pytest|hypothesis")
"""Requirements of the test extra that these tests need."""
CORE, EXTRAS = ".", ".[lab,report,slurm]"
CLASSIFIER = "Programming Language :: Python :: "


def supported_versions() -> list[str]:
    """Return the Python versions that pyproject.toml names, for example `3.10`."""
    classifiers = read_toml(ROOT / "pyproject.toml")["project"]["classifiers"]
    versions = [text.removeprefix(CLASSIFIER) for text in classifiers if text.startswith(CLASSIFIER)]
    return [version for version in versions if "." in version]


def find_interpreter(version: str) -> str:
    """Return the path of an interpreter of `version` on PATH or among pyenv's versions; empty if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    for candidate in filter(None, candidates):
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:  # a shim of pyenv may fail
            return str(candidate)
    return ""


def find_uv() -> str:
    """Return the path of uv, which is installed in a separate folder if PATH has none.

    uv links the 5 GB of a CUDA build of torch from its cache; pip would unpack them for each version.
    """
    if found := shutil.which("uv"):
        return found
    folder = ENVIRONMENTS / "uv"
    if not (folder / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


def commands(uv: str, interpreter: str, environment: Path) -> Iterator[list[str | Path]]:
    """Yield the commands that check one version: core, a training of two processes, extras, tests."""
    extra = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]["test"]
    packages = [requirement for requirement in extra if TEST_PACKAGES.match(requirement)]
    python, suite = environment / "bin" / "python", environment / "suite.toml"
    install = [uv, "pip", "install", "--quiet", "--python", python, "-c", "constraints-cpu.txt"]
    yield [uv, "venv", "--quiet", "--clear", "--python", interpreter, environment]
    yield [*install, "-e", CORE]
    yield [environment / "bin" / "repro", "init", suite]
    results = environment / "results"
    yield [environment / "bin" / "repro", "run", suite, "--only", "plain", "--results", results]
    yield [*install, "-e", EXTRAS, *packages]
    yield [python, "-m", "pytest", *TESTS]


def check_version(uv: str, version: str, interpreter: str) -> str:
    """Run the commands of one version and return the outcome: `ok`, or the command that failed after its output."""
    started, environment = time.monotonic(), ENVIRONMENTS / version
    for command in commands(uv, interpreter, environment):
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=ROOT, check=False, **output)
        if done.returncode:
            print(done.stdout, flush=True)
            return f"failed: {' '.join(map(str, command))} (environment: {environment})"
    shutil.rmtree(environment)
    return f"ok in {time.monotonic() - started:.0f} s"


def main() -> int:
    """Check every supported version, print one line for each, and return 1 if one failed."""
    outcomes = {}
    uv = find_uv()
    for version in supported_versions():
        if version == "{}.{}".format(*sys.version_info):
            outcomes[version] = "not run here: make test runs all tests with this version"
        elif interpreter := find_interpreter(version):
            outcomes[version] = check_version(uv, version, interpreter)
        else:
            outcomes[version] = f"not run: this machine has no python{version}"
        print(f"Python {version}: {outcomes[version]}", flush=True)
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
