"""All programs there are, for `repro doctor` and for the tests."""

from __future__ import annotations

from repro.kernels.cuda import adamw
from repro.kernels.cuda.program import Program

FAMILIES = {"adamw": adamw}
"""Name of a binding's module -> the module."""


def examples() -> list[Program]:
    """One or more programs of every family, as training compiles them."""
    return [program for family in FAMILIES.values() for program in family.examples()]
