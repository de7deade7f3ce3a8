"""Maximum sizes of inputs, each with its reason.

Larger inputs are probably typing errors, and their simulation would exhaust the machine's memory or take hours. With
inputs of the maximum size, a simulation needs less than 4 GiB of host memory (`tests/simulate/test_largest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from repro.config.errors import require

POSITIVE_COUNT = "an integer of at least 1"
"""Description of the valid values of a count, for error messages."""


class SizeLimit(NamedTuple):
    """Upper bound of an input's size, and the reason for this bound."""

    value: int
    why: str


RANKS = SizeLimit(2**20, "ten times the ranks of the largest training runs")
RANKS_PER_CORE = SizeLimit(16, "with more processes per core, process switches dominate the step time")
LAYERS = SizeLimit(4096, "four times the layers of the deepest transformer that was trained")
WIDTH = SizeLimit(2**20, "forty times the width of a 1T model")
VOCAB = SizeLimit(2**24, "sixty times the largest vocabularies")
SEQ = SizeLimit(2**24, "more than the longest contexts, of 10M tokens")
PARAMETERS = SizeLimit(10**15, "1,000 times the largest published models, which have 1T parameters")
SAMPLES = SizeLimit(2**20, "more samples than any published training step has")
MICRO_BATCHES = SizeLimit(2**17, "seven times the 480 micro-batches x 38 stages of Yuan 1.0")
TENSOR_BYTES = SizeLimit(2**60, "sizes in bytes are 64-bit integers")
STEPS = SizeLimit(10**7, "twenty times the steps of GPT-3 at a batch of 1M tokens")
ACTIONS = SizeLimit(10**6, "the timing of larger pipeline schedules takes minutes")

NAME = SizeLimit(100, "names become file names and table columns")


def at_least(part: object, keys: Iterable[str], least: float, expected: str) -> None:
    """Raise `ConfigError` if one of the settings `keys` is under `least`. `expected`: valid values, for the message."""
    for key in keys:
        require(getattr(part, key) >= least, key, getattr(part, key), expected)


def at_most(key: str, value: int, limit: SizeLimit) -> None:
    """Raise `ConfigError` if the value of the input `key` exceeds its size limit."""
    require(value <= limit.value, key, value, f"at most {limit.value:,} ({limit.why})")


def check_name(key: str, name: str) -> None:
    """Raise `ConfigError` for a name that is not a valid file name or is not printable."""
    fine = 0 < len(name) <= NAME.value and name.isprintable() and "/" not in name
    fine = fine and name == name.strip() and not name.startswith((".", "-"))
    right = f"a name of at most {NAME.value} characters without /, which begins with no dot, dash or space"
    require(fine, key, name, f"{right} ({NAME.why})")
