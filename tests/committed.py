"""Cached suites and ledger of the repository: no test changes them, so each process reads each file once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from repro.claims import reader
from repro.claims.ledger import Ledger
from repro.config import suites
from repro.config.suites import Suite


@cache
def suite(path: Path) -> Suite:
    """Return the suite of a file in `suites/`."""
    return suites.load_suite(path)


@cache
def ledger() -> Ledger:
    """Return the ledger with all claims."""
    return reader.load_ledger()
