"""Maximum sizes of inputs, each with its reason.

Larger inputs are mistyped: they would take the memory of the machine, or hours.  At these sizes a simulation needs
less than 4 GiB of host memory (`tests/simulate/test_largest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from repro.config.errors import require

POSITIVE_COUNT = "a whole number of at least 1"
"""Description of the valid values of a count."""


class SizeLimit(NamedTuple):
    """Upper bound of an input, and the reason for it."""

    value: int
    why: str


RANKS = SizeLimit(2**20, "ten times the largest training; groups are listed rank by rank")
RANKS_PER_CORE = SizeLimit(16, "more processes time their turns on a core and not the step")
LAYERS = SizeLimit(4096, "four times the deepest transformer that was trained")
WIDTH = SizeLimit(2**20, "forty times the width of a 1T model")
VOCAB = SizeLimit(2**24, "sixty times the largest vocabularies")
SEQ = SizeLimit(2**24, "more than the longest contexts, of 10M tokens")
PARAMETERS = SizeLimit(10**15, "a thousand times the 1T of the sources")
SAMPLES = SizeLimit(2**20, "more samples at once than any source has in a step")
MICRO_BATCHES = SizeLimit(2**17, "seven times Yuan 1.0's 480 on 38 stages; each is scheduled")
TENSOR_BYTES = SizeLimit(2**60, "elements are counted in 64 bits")
STEPS = SizeLimit(10**7, "twenty times GPT-3's at a batch of 1M tokens; a record has the loss of each")
ACTIONS = SizeLimit(10**6, "larger schedules take minutes to time, and no picture shows them")

NAME = SizeLimit(100, "names become files and columns of tables")


def at_least(part: object, keys: Iterable[str], least: float, expected: str) -> None:
    """Raise `ConfigError` if an attribute of `part` is under `least`; `expected` describes the valid values."""
    for key in keys:
        require(getattr(part, key) >= least, key, getattr(part, key), expected)


def at_most(key: str, value: int, limit: SizeLimit) -> None:
    """Raise `ConfigError` if `value` is over `limit`."""
    require(value <= limit.value, key, value, f"at most {limit.value:,} ({limit.why})")


def check_name(key: str, name: str) -> None:
    """Raise `ConfigError` for a name that no file can have, or that is not readable."""
    fine = 0 < len(name) <= NAME.value and name.isprintable() and "/" not in name
    fine = fine and name == name.strip() and not name.startswith((".", "-"))
    right = f"a name without / of at most {NAME.value} characters, which begins with no dot, dash or space"
    require(fine, key, name, f"{right} ({NAME.why})")
