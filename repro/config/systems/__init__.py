"""The hardware of the reports as data files, and `local`, the machine at hand.

repro.config.systems.names()          ["dgx2", "dgx2h", ..., "local"]
repro.config.systems.load("dgx2")     a frozen System; a path to one's own .toml works too

`suites`, `simulate` and higher levels import it.
"""

from repro.config.systems.load import HERE, load, names

__all__ = ["HERE", "load", "names"]
