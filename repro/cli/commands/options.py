"""Options that several commands have, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from repro.config.errors import ConfigError, require


def check_folder(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """What is there already must be a folder."""
    fine = value is None or value.is_dir() or not value.exists()
    require(fine, option.opts[0], str(value), "a folder; this is a file")
    return value


def check_writable_file(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """A file that cannot be written is found out before the work that fills it."""
    if value is not None:
        from repro.config.files import check_writable

        check_writable(option.opts[0], value)
    return value


def _existing(context: typer.Context, option: typer.CallbackParam, value: Path) -> Path:
    """Who names a folder that is not there has mistyped it; that there is no `results` yet is no mistake."""
    if _given(context, option) and not value.exists():
        raise ConfigError("--results", str(value), says="no such folder")
    check_folder(option, value)
    return value


def check_count(context: typer.Context, option: typer.CallbackParam, value: int) -> int:
    """A number of something: its default of 0 means that it was not given, which a 0 that is written does not."""
    right = "a whole number of at least 1, or left out"
    require(not _given(context, option) or value >= 1, option.opts[0], value, right)
    return value


def _given(context: typer.Context, option: typer.CallbackParam) -> bool:
    source = context.get_parameter_source(option.name or "")
    return source is not None and source.name == "COMMANDLINE"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Details = Annotated[bool, typer.Option("--details", help="Print all results, not one screen of them.")]
SuiteFiles = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Argument(help="Suites: files, or names of packaged ones.", metavar="SUITE..."),
]
SuiteFile = Annotated[
    Path, typer.Argument(help="A suite: a file, or the name of a packaged one.", metavar="SUITE")
]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates this on Python 3.10 as well
    typer.Option("--only", help="Only experiments of this name or glob; may be repeated.", metavar="GLOB"),
]
Rerun = Annotated[bool, typer.Option("--rerun", help="Run again what the store already holds.")]
ProfileFile = Annotated[
    Path,
    typer.Option(
        "--profile", help="How the site's SLURM is asked: a file, or a packaged name.", metavar="PROFILE"
    ),
]
Results = Annotated[
    Path, typer.Option("--results", help="Where records are stored.", metavar="DIR", callback=check_folder)
]
StoredResults = Annotated[
    Path,
    typer.Option("--results", help="Where records are stored.", metavar="DIR", callback=_existing),
]
Ledger = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--ledger", help="Judge the claims of this file too; may be repeated.", metavar="FILE.toml"),
]
ModelName = Annotated[
    str, typer.Option("--model", help="A model's name, its file, or FILE.toml:NAME.", metavar="M")
]
