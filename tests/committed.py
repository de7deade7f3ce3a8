"""The repository's own suites and ledger, which no test changes: each file is read and checked once by a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from repro.claims import reader
from repro.claims.ledger import Ledger
from repro.config import suites
from repro.config.suites import Suite


@cache
def suite(path: Path) -> Suite:
    """The suite of a file of `suites/`."""
    return suites.load_suite(path)


@cache
def ledger() -> Ledger:
    """All claims."""
    return reader.load_ledger()
