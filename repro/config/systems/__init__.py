"""The packaged system files, their reader, and the unknown numbers in them.

`load("dgx2")` returns a frozen `System`; a path to a `.toml` file works too. `repro.measure.local_system` describes the
local machine.
"""

from repro.config.systems.load import HERE, load, names

__all__ = ["HERE", "load", "names"]
