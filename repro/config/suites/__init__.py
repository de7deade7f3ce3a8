"""Suites: TOML files that name experiments, what they share, and which of them are compared.

repro.config.suites.load(Path("suites/smoke.toml"))     a frozen Suite, checked

`launch` and `claims` import it.
"""

from repro.config.suites.entry import Entry
from repro.config.suites.read import Comparison, Suite, load, parse

__all__ = ["Comparison", "Entry", "Suite", "load", "parse"]
