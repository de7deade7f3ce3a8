"""`repro init`: what was written, and what to do with it."""

from __future__ import annotations

import shlex
from pathlib import Path

from repro.config.suites.template import write


def command(path: Path) -> int:
    """Write a commented suite and print the next commands.  Raises `ConfigError`."""
    suite = write(path)
    names = ", ".join(entry.experiment.name for entry in suite.entries)
    print(f"{path}: a suite with {len(suite.entries)} experiments ({names}) and a comparison")
    command = f"repro run {shlex.quote(str(path))}"
    print(f"next: {command} --dry-run, then {command}")
    return 0
