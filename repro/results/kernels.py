"""Which kernels ran, of all ranks: what a record says, and what a person must be told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Ran = dict[str, dict[str, int]]
"""Operator -> `cuda` or `torch: why` -> ranks on which it ran so.

The one operator is `every operator` where there was no choice: on a CPU, or under `kernels = "reference"`.
"""


def of_ranks(results: Sequence[dict[str, Any]]) -> Ran:
    """What all ranks say together; nothing of records older than this."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for name, hows in result.get("kernels", {}).items():
            found[name].update(hows)
    return {name: dict(hows) for name, hows in sorted(found.items())}


def fallbacks(ran: Ran) -> dict[str, list[str]]:
    """Why torch's operators ran where CUDA kernels should have -> which."""
    found: dict[str, list[str]] = {}
    for name, hows in ran.items():
        for how in hows:
            if how != "cuda" and name != "every operator":
                found.setdefault(how.removeprefix("torch: "), []).append(name)
    return found
