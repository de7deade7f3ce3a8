"""Suite files: TOML files that name experiments, their shared settings and their comparisons.

`load(Path("suites/smoke.toml"))` returns a checked, frozen `Suite`; a packaged suite is loaded by its name.
"""

from repro.config.suites.entry import Entry
from repro.config.suites.read import Comparison, Suite, load, parse

__all__ = ["Comparison", "Entry", "Suite", "load", "parse"]
