"""Options that several commands have, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
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
ModelName = Annotated[str, typer.Option("--model", help="A model's name, or its file.", metavar="M")]
SystemName = Annotated[str, typer.Option("--system", help="A system's name, or its file.", metavar="S")]
Gpus = Annotated[int, typer.Option("--gpus", help="Devices: tp x pp x dp.", metavar="N")]
Seq = Annotated[
    int, typer.Option(help="Tokens of a sample; the model's longest by default.", show_default=False)
]
MemoryLimit = Annotated[
    str,
    typer.Option(help="Take the device's memory for this much: 32GB, 32GiB or 16e9.", metavar="SIZE"),
]
Expandable = Annotated[bool, typer.Option("--expandable", help="torch's expandable segments.")]
