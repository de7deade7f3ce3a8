"""Cached suites and ledger of the repository: no test changes them, so each process reads each file once."""

from __future__ import annotations

from functools import cache

from repro.claims import reader
from repro.config import suites

suite = cache(suites.load_suite)
"""Return the suite of a file in `suites/`."""
ledger = cache(reader.load_ledger)
"""Return the ledger with all claims."""
