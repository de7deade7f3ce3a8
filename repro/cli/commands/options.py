"""Options that several commands have, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
SuiteFiles = Annotated[list[Path], typer.Argument(help="Suite files.", metavar="SUITE.toml...")]
SuiteFile = Annotated[Path, typer.Argument(help="A suite file.", metavar="SUITE.toml")]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates this on Python 3.10 as well
    typer.Option("--only", help="Only experiments of this name or glob; may be repeated.", metavar="GLOB"),
]
Rerun = Annotated[bool, typer.Option("--rerun", help="Run again what the store already holds.")]
ProfileFile = Annotated[
    Path, typer.Option("--profile", help="How the site's SLURM is asked.", metavar="FILE.toml")
]
Results = Annotated[Path, typer.Option("--results", help="Where records are stored.", metavar="DIR")]
ModelName = Annotated[
    str, typer.Option("--model", help="A model's name, its file, or FILE.toml:NAME.", metavar="M")
]
